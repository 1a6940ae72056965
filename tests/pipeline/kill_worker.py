"""Runs one attempt of a job as the command line does, but with small units, so that parts are committed on the way."""

import sys

from jobs import UnitLimits
from pipeline.batch import run_job
from pipeline.config import InputConfig, JobConfig, ModelConfig, RunConfig, SummaryConfig
from pipeline.report import Reporter
from pipeline.stopping import StopSwitch
from pipeline.tasks import TASKS

STREAMS = 8
UNIT_ROWS = 3


def main(model: str, source: str, output: str) -> int:
    config = RunConfig(
        TASKS["summarize"],
        ModelConfig(model, dtype="float32", device="cpu", streams=STREAMS, pass_tokens=64),
        InputConfig((source,), id_field="id"),
        SummaryConfig("notes", "Sum up.", "Note.", "all", max_new_tokens=5, segment_tokens=64, window=128),
        JobConfig(output),
    )
    with StopSwitch(20) as stop:
        summary = run_job(config, Reporter(quiet=True), stop, UnitLimits(rows=UNIT_ROWS))
    return int(summary["exit_code"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
