"""kill -9 at random moments: the output is, byte for byte, that of an undisturbed run."""

import random
import subprocess
import sys
import time
from pathlib import Path

from tests.conftest import command_environment, read_jsonl, write_jsonl
from tests.pipeline.kill_worker import STREAMS, UNIT_ROWS, main
from tests.pipeline.test_cli import text_of

DOCUMENTS = 40


class Progress:
    """What can be seen of a job from outside."""

    def __init__(self, job: Path) -> None:
        self.parts = len(list(job.glob("parts/*.jsonl")))
        self.finished = UNIT_ROWS * self.parts + len(list(job.glob("state/*/*.row")))

    @property
    def in_work(self) -> int:
        return min(STREAMS - 1, DOCUMENTS - self.finished)


def test_five_kills_change_nothing(tmp_path: Path, tiny_model: Path) -> None:
    source = write_jsonl(
        tmp_path / "in.jsonl", [{"id": index, "text": text_of(index, 6 + index % 7)} for index in range(DOCUMENTS)]
    )
    undisturbed = tmp_path / "undisturbed.jsonl"
    assert main(str(tiny_model), str(source), str(undisturbed)) == 0

    output, job = tmp_path / "out.jsonl", tmp_path / "out.jsonl.job"
    command = [sys.executable, "-m", "tests.pipeline.kill_worker", str(tiny_model), str(source), str(output)]
    chance = random.Random()
    seen: list[Progress] = []
    # The first while it starts or has just begun; the others once so many rows more are finished, at a random moment.
    for more_rows, parts in ((0, 0), (1, 1), (3, 1), (3, 1), (3, 1)):
        wanted = Progress(job).finished + more_rows
        process = subprocess.Popen(command, env=command_environment(), stderr=subprocess.PIPE)
        while (now := Progress(job)).finished < wanted or now.parts < parts:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 2.0 if not more_rows else 0.2))
        assert process.poll() is None, "the job was over before it could be killed"
        process.kill()
        process.communicate()
        seen.append(Progress(job))
    assert sum(each.parts >= 1 and each.in_work >= 4 for each in seen) >= 3

    last = subprocess.run(command, env=command_environment(), capture_output=True, text=True)
    assert last.returncode == 0, last.stderr
    assert output.read_bytes() == undisturbed.read_bytes()
    assert [record["row"] for record in read_jsonl(output)] == list(range(DOCUMENTS))
