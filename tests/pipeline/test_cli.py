"""The command line as users run it: exit codes, what goes to stdout and to stderr, and the rows."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from tests.conftest import Outcome, command_environment, read_jsonl, write_jsonl

Batch = Callable[..., Outcome]

SENTENCES = [
    "Ships left the harbour of the northern town with salt, wool and grain on the first morning of May.",
    "The council raised the tax on salt, although the keepers of the warehouses had spoken against it.",
    "A new bridge was opened for the road between both towns, and the market moved to its western end.",
    "Twelve families from the valley bought land near the river and planted orchards in the second year.",
    "The library received four hundred books from the estate of a merchant who had died without heirs.",
    "In autumn the river rose above the old wall and carried two mills and a part of the garden away.",
]


def text_of(seed: int, sentences: int) -> str:
    return " ".join(
        SENTENCES[(seed + index * (seed % 5 + 1)) % 6].replace("two", str(index)) for index in range(sentences)
    )


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"key": f"d{index}", "text": text_of(index, 3 + index), "year": 1900 + index} for index in range(count)]


def run_here(*arguments: object, input: str | None = None) -> Outcome:
    """The same command in this process: for what needs the model but not a process of its own."""
    result = CliRunner().invoke(app, [*map(str, arguments)], input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


def test_a_job_from_start_to_rerun(batch: Batch, tmp_path: Path, tiny_model: Path) -> None:
    rows = rows_of(5)
    lines = [json.dumps(row) for row in rows]
    lines[1:1] = [json.dumps({"key": "empty", "text": " \n"}), "{bad json", json.dumps({"key": "null", "text": None})]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = (
        "summarize",
        "in.jsonl",
        "out.jsonl",
        "--model",
        tiny_model,
        "--id-field",
        "key",
        "--keep",
        "year",
        "--max-errors",
        1,
    )

    done = batch(*command)

    assert done.code == 0, done.err
    assert done.err == ""
    assert len(done.out.splitlines()) == 1
    counts = {key: done.summary[key] for key in ("status", "rows", "ok", "skipped", "error", "exit_code", "output")}
    assert counts == {
        "status": "done", "rows": 8, "ok": 5, "skipped": 2, "error": 1, "exit_code": 0, "output": "out.jsonl"
    }  # fmt: skip
    assert done.summary["input_tokens"] > 1000
    assert done.summary["tokens_per_second"] > 0

    records = read_jsonl(tmp_path / "out.jsonl")
    assert [record["row"] for record in records] == list(range(8))
    assert [record["status"] for record in records] == ["ok", "skipped", "error", "skipped", "ok", "ok", "ok", "ok"]
    assert records[1]["reason"] == "empty text"
    assert records[3]["reason"] == "null text"
    assert records[2]["error"]["type"] == "BadLine"
    assert "line 3" in records[2]["error"]["message"]
    by_id = {row["key"]: row for row in rows}
    for record in records:
        assert record["source"] == "in.jsonl"
        assert record["model"] == str(tiny_model)
        assert record["schema_version"] == 1
        if record["status"] == "ok":
            row = by_id[record["id"]]
            assert record["fields"] == {"year": row["year"]}
            assert record["usage"]["segments"] >= 1
            assert record["usage"]["output_tokens"] == 0
            assert all(row["text"][note["start"] : note["end"]] == note["text"] for note in record["notes"])
            assert record["summary"] == " ".join(note["text"] for note in record["notes"])

    again = batch(*command)
    assert (again.code, again.err) == (0, "")
    assert again.summary == done.summary

    other = batch(*command, "--window", 300)
    assert other.code == 3
    assert "request.summary.window" in other.err
    assert "then: null" in other.err
    assert "now:  300" in other.err
    assert "--restart" in other.err
    assert other.summary["exit_code"] == 3

    restarted = run_here(
        "summarize",
        tmp_path / "in.jsonl",
        tmp_path / "out.jsonl",
        "--model",
        tiny_model,
        "--restart",
        "--quiet",
        "--max-errors",
        "50%",
    )
    assert restarted.code == 0
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 8


def test_a_finished_job_is_found_without_loading_a_model(tmp_path: Path, tiny_model: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", rows_of(1))
    arguments = ("summarize", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--model", str(tiny_model))
    first = run_here(*arguments)
    assert first.code == 0
    probe = (
        "import sys; from pipeline.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as end: code = end.code\n"
        "print([name for name in ('torch', 'transformers', 'tokenizers') if name in sys.modules], code)"
    )
    began = os.times().children_user
    found = subprocess.run(
        [sys.executable, "-c", probe, *arguments], env=command_environment(), capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[-1] == "[] 0"
    assert os.times().children_user - began < 2.0
    assert json.loads(found.stdout.splitlines()[-2]) == first.summary


def test_help_imports_nothing_heavy() -> None:
    probe = (
        "import sys; from pipeline.cli import app\n"
        "try: app(['summarize', '--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers', 'pyarrow', 'numpy') if name in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", probe], env=command_environment(), capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines()[-1] == "[]"
    assert "--segment-tokens" in shown.stdout
    assert "Exit codes" in shown.stdout


USER_ERRORS: dict[str, tuple[list[str], int, str]] = {
    "no arguments": (["summarize"], 2, "Missing argument"),
    "no output": (["summarize", "in.jsonl"], 2, "Missing argument"),
    "unknown option": (["summarize", "in.jsonl", "out.jsonl", "--windows", "9"], 2, "--windows"),
    "unknown style": (["summarize", "in.jsonl", "out.jsonl", "--style", "poem"], 2, "poem"),
    "negative limit": (["summarize", "in.jsonl", "out.jsonl", "--limit", "0"], 2, "--limit"),
    "no such input": (["summarize", "nothing.jsonl", "out.jsonl"], 3, "nothing.jsonl"),
    "unmatched pattern": (["summarize", "*.gz", "out.jsonl"], 3, "*.gz"),
    "unknown output ending": (["summarize", "in.jsonl", "out.csv"], 3, ".jsonl"),
    "output is the input": (["summarize", "in.jsonl", "in.jsonl"], 3, "both input and output"),
    "output exists": (["summarize", "in.jsonl", "taken.jsonl"], 3, "taken.jsonl exists"),
    "output is a folder": (["summarize", "in.jsonl", "folder.jsonl"], 3, "is a folder"),
    "missing column": (["summarize", "in.parquet", "out.jsonl", "--text-field", "txet"], 3, "text"),
    "bad error limit": (["summarize", "in.jsonl", "out.jsonl", "--max-errors", "many"], 3, "--max-errors many"),
    "no such model": (["summarize", "in.jsonl", "out.jsonl", "--model", "./no-model"], 3, "no-model"),
    "unknown device": (["summarize", "in.jsonl", "out.jsonl", "--device", "tpu"], 2, "tpu"),
    "bad budget": (["summarize", "in.jsonl", "out.jsonl", "--vram", "much", "--model", "MODEL"], 3, "much"),
    "tiny budget": (["summarize", "in.jsonl", "out.jsonl", "--vram", "1KB", "--model", "MODEL"], 3, "budget"),
    "window over training": (
        ["summarize", "in.jsonl", "out.jsonl", "--window", "5000", "--model", "MODEL"], 3, "trained for 1024"
    ),
    "segment over window": (
        ["summarize", "in.jsonl", "out.jsonl", "--window", "300", "--segment-tokens", "400", "--model", "MODEL"],
        3,
        "exceed the window of 300",
    ),
    "prompt over window": (
        ["summarize", "in.jsonl", "out.jsonl", "--model", "MODEL", "--prompt", "x y " * 900], 3, "shorter --prompt"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", USER_ERRORS)
def test_user_errors_give_a_message_and_a_code(
    case: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, code, says = USER_ERRORS[case]
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", rows_of(1))
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "in.parquet")
    (tmp_path / "taken.jsonl").write_text("mine\n")
    (tmp_path / "folder.jsonl").mkdir()

    failed = run_here(*[str(tiny_model) if argument == "MODEL" else argument for argument in arguments])

    assert failed.code == code, failed.err
    assert says in failed.err
    assert "Traceback" not in failed.err
    if code == 3:
        assert failed.summary["exit_code"] == 3
        assert says in failed.summary["error"]
        assert not (tmp_path / "out.jsonl").exists()
    assert (tmp_path / "taken.jsonl").read_text() == "mine\n"


def test_written_notes_into_parquet(tmp_path: Path, tiny_model: Path) -> None:
    table = pa.table({"key": [7, 8], "text": [text_of(0, 40), text_of(1, 2)]})
    pq.write_table(table, tmp_path / "in.parquet")
    done = run_here(
        "summarize", tmp_path / "in.parquet", tmp_path / "out.parquet", "--model", tiny_model, "--id-field", "key",
        "--style", "notes", "--notes", "all", "--max-new-tokens", 6, "--segment-tokens", 200, "--window", 420,
        "--streams", 3,
        "--prompt", "Sum up.", "--note-prompt", "Note.",
    )  # fmt: skip
    assert done.code == 0, done.err
    long, short = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [long["id"], short["id"]] == ["7", "8"]
    assert long["usage"]["segments"] > 5
    assert long["usage"]["output_tokens"] > 6
    assert len(long["notes"]) >= long["usage"]["segments"]
    assert short["notes"] is None
    assert short["error"] is None


def test_drafts_change_nothing_but_the_speed(tmp_path: Path, tiny_model: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"text": text_of(seed, 12)} for seed in range(2)])

    def written(name: str, *options: object) -> bytes:
        done = run_here(
            "summarize", tmp_path / "in.jsonl", tmp_path / name, "--model", tiny_model, "--style", "notes",
            "--dtype", "float32", "--max-new-tokens", 12, "--segment-tokens", 200, "--window", 420, *options,
        )  # fmt: skip
        assert done.code == 0, done.err
        return (tmp_path / name).read_bytes()

    plain = written("plain.jsonl")
    assert written("ngrams.jsonl", "--draft-tokens", 5) == plain
    assert written("model.jsonl", "--draft-model", tiny_model, "--vram", "1GB") == plain
    assert written("plain.jsonl", "--draft-tokens", 3) == plain  # the same job: it is not refused as another one


def test_a_draft_model_without_drafts_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", rows_of(1))
    paths = (tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    failed = run_here("summarize", *paths, "--model", tiny_model, "--draft-model", tiny_model, "--draft-tokens", 0)
    assert failed.code == 3
    assert "--draft-tokens 0" in failed.err


def test_a_text_file_is_read_whole_and_offsets_are_bytes(tmp_path: Path, tiny_model: Path) -> None:
    text = "Überfahrt. " + text_of(3, 30)
    with gzip.open(tmp_path / "town.txt.gz", "wt", encoding="utf-8") as file:
        file.write(text)
    done = run_here("summarize", tmp_path / "town.txt.gz", tmp_path / "out.jsonl.gz", "--model", tiny_model)
    assert done.code == 0, done.err
    with gzip.open(tmp_path / "out.jsonl.gz", "rt", encoding="utf-8") as file:
        record = json.loads(file.read())
    assert record["id"] == "town.txt.gz"
    data = text.encode()
    for note in record["notes"]:
        assert data[note["start"] : note["end"]].decode() == note["text"]


def test_too_many_errors_and_no_success_at_all_are_4(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": text_of(0, 2)}) + "\n{\n{\n")
    done = run_here("summarize", tmp_path / "bad.jsonl", tmp_path / "bad-out.jsonl", "--model", tiny_model)
    assert (done.code, done.summary["error"]) == (4, 2)
    assert len(read_jsonl(tmp_path / "bad-out.jsonl")) == 3
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    done = run_here("summarize", tmp_path / "empty.jsonl", tmp_path / "empty-out.jsonl", "--model", tiny_model)
    assert (done.code, done.summary["skipped"]) == (4, 1)


def test_a_damaged_file_is_never_a_success(tmp_path: Path, tiny_model: Path) -> None:
    packed = gzip.compress("".join(json.dumps(row) + "\n" for row in rows_of(8)).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[:-20])
    done = run_here(
        "summarize",
        tmp_path / "cut.jsonl.gz",
        tmp_path / "out.jsonl",
        "--model",
        tiny_model,
        "--max-errors",
        "100%",
        "--limit",
        999,
    )
    assert done.code == 4
    assert read_jsonl(tmp_path / "out.jsonl")[-1]["error"]["type"] == "DamagedFile"


def test_limit_and_new_files_of_a_folder(tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "b.jsonl", rows_of(2))
    write_jsonl(folder / "c.jsonl", rows_of(2))
    command = ("summarize", folder, tmp_path / "out.jsonl", "--model", tiny_model, "--limit", 3)
    done = run_here(*command)
    assert (done.code, done.summary["rows"]) == (0, 3)
    assert [Path(record["source"]).name for record in read_jsonl(tmp_path / "out.jsonl")] == [
        "b.jsonl",
        "b.jsonl",
        "c.jsonl",
    ]
    write_jsonl(folder / "a.jsonl", rows_of(1))
    again = run_here(*command)
    assert again.code == 0
    assert "a.jsonl" in again.err
    assert "new since" in again.err
    write_jsonl(folder / "c.jsonl", rows_of(3))
    changed = run_here(*command)
    assert changed.code == 3
    assert "inputs[1].size" in changed.err


def test_the_demo_model_is_named_once(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", rows_of(1))
    done = run_here("summarize", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--window", 999_999)
    assert done.err.count("demo model") == 1
    assert "--model" in done.err.splitlines()[0]


def test_options_without_effect_are_named(tmp_path: Path, tiny_model: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", rows_of(1))
    arguments = (
        "summarize",
        tmp_path / "in.jsonl",
        tmp_path / "out.jsonl",
        "--model",
        tiny_model,
        "--temperature",
        0.5,
    )
    assert "--temperature" in run_here(*arguments).err
    events = run_here(*arguments, "--restart", "--log-json").err.splitlines()
    assert [json.loads(line)["event"] for line in events] == ["note"]
    assert run_here(*arguments, "--restart", "--quiet").err == ""


def test_stdin_is_read_once(tmp_path: Path, tiny_model: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows_of(2))
    done = run_here("summarize", "-", tmp_path / "out.jsonl", "--model", tiny_model, input=lines)
    assert done.code == 0, done.err
    assert "cannot be resumed" in done.err
    assert [record["source"] for record in read_jsonl(tmp_path / "out.jsonl")] == ["-", "-"]


def start(tmp_path: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pipeline.cli", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=tmp_path, env=command_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_a_saved_row(job: Path, process: "subprocess.Popen[str]") -> None:
    for _ in range(6000):
        if any(job.glob("state/*/*.row")):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("no row was saved in two minutes")


def test_a_signal_stops_a_job_that_can_be_resumed(tmp_path: Path, tiny_model: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"text": text_of(index, 2 if index == 0 else 250)} for index in range(6)])
    arguments = ("summarize", "in.jsonl", "out.jsonl", "--model", tiny_model, "--grace", "0.1", "--pass-tokens", 32)
    process = start(tmp_path, *arguments)
    wait_for_a_saved_row(tmp_path / "out.jsonl.job", process)

    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    summary = json.loads(out.splitlines()[-1])
    assert summary["status"] == "stopped"
    assert summary["exit_code"] == 143
    assert 1 <= summary["rows"] < 6
    assert "Traceback" not in err
    assert not (tmp_path / "out.jsonl").exists()
    assert len(list((tmp_path / "out.jsonl.job" / "runs").glob("*.json"))) == 1


def test_a_second_run_of_the_same_job_is_turned_away(batch: Batch, tmp_path: Path, tiny_model: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"text": text_of(index, 2 if index == 0 else 400)} for index in range(6)])
    arguments = ("summarize", "in.jsonl", "out.jsonl", "--model", tiny_model, "--pass-tokens", 32, "--grace", 60)
    process = start(tmp_path, *arguments)
    try:
        wait_for_a_saved_row(tmp_path / "out.jsonl.job", process)
        second = batch(*arguments)
        assert second.code == 75
        assert re.search(rf"\b{process.pid}\b", second.err)
        assert batch(*arguments, "--skip-code", 99).code == 99
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None  # finishing what it has in work
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
        assert process.returncode == 130
    finally:
        process.kill()
        process.communicate()


def test_a_bug_is_1_and_shows_itself(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "in.jsonl", rows_of(1))
    monkeypatch.setattr("pipeline.loading.plan_window", lambda *_, **__: 1 / 0)
    result = CliRunner().invoke(
        app, ["summarize", str(tmp_path / "in.jsonl"), str(tmp_path / "o.jsonl"), "--model", str(tiny_model)]
    )
    assert isinstance(result.exception, ZeroDivisionError)
    assert result.exit_code == 1
    assert json.loads(result.stdout.splitlines()[-1])["exit_code"] == 1
