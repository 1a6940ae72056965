"""README's promises that can be checked without running a job: its options and its commands."""

import re
from pathlib import Path

import typer.main

from pipeline.cli import app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_names_exactly_the_options_that_there_are() -> None:
    group = typer.main.get_command(app)
    command = group.commands["summarize"]  # type: ignore[attr-defined]
    taken = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    table = README.split("| Option | |", 1)[1].split("\n\n", 1)[0]
    named = {option for row in table.splitlines() for option in re.findall(r"`(--[a-z-]+)`", row.partition(" | ")[0])}

    assert named == taken


def test_the_check_script_installs_and_tests_as_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")

    assert "-c constraints.txt" in script
    for part in ("streamllm-batch summarize samples/quick.parquet", "--no-deps", "python -m pytest"):
        assert part in script
        assert part in README
