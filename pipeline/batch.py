"""One attempt at a job: rows in, tasks over the engine, results saved one by one, the output at the end."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jobs import Envelope, FingerprintError, Job, JobRecord, RowKey, UnitLimits, read_job
from jobs import Row as PlannedRow
from jobs.fingerprint import describe, differences
from jobs.record import job_folder
from jobs.recovery import refuse_foreign
from jobs.store import LocalStore
from pipeline.config import RunConfig, pinned_files
from pipeline.documents import Document, check_inputs, read_rows
from pipeline.errors import UserError
from pipeline.inputs import InputFile, resolve_inputs
from pipeline.output import output_format, write_records
from pipeline.report import Reporter, State, Totals
from pipeline.rows import Place, Row
from pipeline.stopping import GraceOver, StopSwitch

if TYPE_CHECKING:
    from pipeline.loading import Loaded

EXIT_TOO_MANY_ERRORS = 4


def run_job(
    config: RunConfig,
    reporter: Reporter,
    stop: StopSwitch,
    limits: UnitLimits = UnitLimits(),  # noqa: B008 (frozen)
) -> dict[str, Any]:
    """Begin, resume or merely find finished the job of `config`; returns its summary, with the "exit_code".

    `limits` says how many rows of a new job are committed together. Raises UserError, JobError, StreamLLMError and
    OSError; whatever was saved until then stays saved.
    """
    output_format(config.job.output)
    record = None if config.job.restart else read_job(config.job.output)
    files = _files(config, record, reporter)
    request = config.request(files)
    recorded = {"inputs": [asdict(file) for file in files], "options": _options(config)}
    if record is not None:
        known = {**record.fingerprint, "request": request}
        with Job.open(config.job.output, config=recorded, fingerprint=known) as job:
            if job.summary is not None:
                return job.summary
            if not all(file.resumable for file in files):
                raise UserError(
                    "standard input cannot be read again, so its job cannot be resumed; --restart begins anew"
                )
            loaded = _load(config, files, reporter)
            changed = differences(record.fingerprint, {"request": request, "resolved": loaded.resolved})
            if changed:
                raise FingerprintError(
                    f"the job was begun with something else:\n{describe(changed)}\n"
                    "run it as before, or with --restart to begin anew"
                )
            return _Attempt(config, job, loaded, files, reporter, stop).run()
    folder = job_folder(config.job.output)
    refuse_foreign(folder.with_name(folder.name.removesuffix(".job")), LocalStore(folder))
    loaded = _load(config, files, reporter)
    fingerprint = {"request": request, "resolved": loaded.resolved}
    recorded["resolved"] = loaded.resolved
    with Job.open(
        config.job.output, config=recorded, fingerprint=fingerprint, restart=config.job.restart, limits=limits
    ) as job:
        return _Attempt(config, job, loaded, files, reporter, stop).run()


def _files(config: RunConfig, record: JobRecord | None, reporter: Reporter) -> tuple[InputFile, ...]:
    wanted = config.inputs
    found = resolve_inputs(wanted.paths, wanted.format, config.job.output)
    for skipped in found.skipped:
        reporter.note(f"{skipped.path}: not read ({skipped.reason})")
    files = found.files
    if record is not None:
        files, new = pinned_files(record.config["inputs"], found)
        if new:
            shown = ", ".join(new[:5]) + (f" and {len(new) - 5} more" if len(new) > 5 else "")
            reporter.note(f"new since the job was begun, and not part of it: {shown}")
    check_inputs(files, wanted.text_field, wanted.id_field, wanted.keep)
    return files


def _options(config: RunConfig) -> dict[str, Any]:
    return {
        "model": asdict(config.model),
        "inputs": asdict(config.inputs),
        "summary": asdict(config.summary),
        "job": asdict(config.job),
    }


def _load(config: RunConfig, files: tuple[InputFile, ...], reporter: Reporter) -> "Loaded":
    # The model's libraries take seconds to import, which a finished job or a wrong option must not wait for.
    from pipeline.loading import load

    if config.model.name is None:
        reporter.note(
            f"no --model given: using the demo model {config.model_name} (135M parameters, English, to try out); "
            "choose a stronger one with --model, for example --model Qwen/Qwen2.5-7B-Instruct or a model folder"
        )
    if not all(file.resumable for file in files):
        reporter.note("standard input cannot be read twice, so this job cannot be resumed once it is stopped")
    return load(config, reporter)


class _Attempt:
    """This process's run of the job, from where earlier ones have left it."""

    def __init__(
        self,
        config: RunConfig,
        job: Job,
        loaded: "Loaded",
        files: tuple[InputFile, ...],
        reporter: Reporter,
        stop: StopSwitch,
    ) -> None:
        self._config = config
        self._job = job
        self._loaded = loaded
        self._files = files
        self._reporter = reporter
        self._stop = stop
        self._began = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Work until the input ends or a signal says stop."""
        ended = "failed"
        try:
            complete = self._work()
            ended = "done" if complete else "stopped"
            return self._finalize() if complete else self._stopped()
        finally:
            self._reporter.close()
            report = {**self._measured(), "ended": ended, **asdict(self._job.progress)}
            self._job.write_report({**report, "engine": self._loaded.counters()})

    def _work(self) -> bool:
        """Whether all rows are finished; False when a signal came first."""
        runner, job = self._loaded.runner, self._job
        try:
            for row in self._rows():
                if self._stop.requested:
                    break
                if not job.admit(PlannedRow(RowKey(row.input, row.ordinal), row.size, row.place.offset)):
                    continue
                if row.skip_reason is not None or row.error is not None:
                    # Costs nothing to find out again, so it need not be synced to disk by itself.
                    self._save(row, self._loaded.unread_record(row), durable=False)
                    continue
                while not runner.has_room and not self._stop.requested:
                    self._step()
                if self._stop.requested:
                    break
                document = Document(row, self._loaded.encode)
                runner.start(document, self._config.task.run(document, self._loaded.options))
            else:
                job.end_of_input()
            while runner.busy:
                self._stop.check()
                self._step()
        except GraceOver:
            return False
        return not self._stop.requested

    def _rows(self) -> Iterator[Row]:
        """The rows of the job in order, from the last committed one on."""
        wanted, after = self._config.inputs, self._job.resume_after
        if after is None or wanted.limit is not None:  # a limit counts all rows
            after = PlannedRow(RowKey(0, 0), 0)
        rows = itertools.chain.from_iterable(
            read_rows(
                file,
                wanted.text_field,
                wanted.id_field,
                wanted.keep,
                start=Place(after.key.ordinal if file.index == after.key.input else 0),
            )
            for file in self._files[after.key.input :]
        )
        return itertools.islice(rows, wanted.limit)

    def _step(self) -> None:
        for finished in self._loaded.runner.step():
            self._save(finished.document.row_, self._loaded.finished_record(finished), durable=True)
        progress = self._job.progress
        tokens = self._loaded.tokens
        self._reporter.progress(
            State(progress.rows, progress.error, self._loaded.runner.active, tokens, time.monotonic() - self._began)
        )

    def _save(self, row: Row, record: dict[str, Any], *, durable: bool) -> None:
        self._job.save_row(Envelope(RowKey(row.input, row.ordinal), record["status"], record), durable)

    def _finalize(self) -> dict[str, Any]:
        output, totals = self._config.job.output, Totals()
        # Filled in while the output is written: only then have the rows of earlier attempts been seen.
        summary: dict[str, Any] = {"status": "done", "exit_code": 0}

        def write(path: str, envelopes: Iterator[Envelope]) -> int:
            def records() -> Iterator[dict[str, Any]]:
                for envelope in envelopes:
                    totals.add(envelope.record)
                    yield envelope.record

            written = write_records(path, records(), output_format(output))
            summary.update(totals.as_dict() | self._measured())
            summary.update(output=output, exit_code=self._verdict(totals))
            return written

        self._job.finalize(write, summary, self._config.job.keep_parts)
        return self._job.summary or summary

    def _verdict(self, totals: Totals) -> int:
        bad = not totals.ok or totals.damaged or self._config.job.max_errors.exceeded(totals.error, totals.rows)
        return EXIT_TOO_MANY_ERRORS if bad else 0

    def _stopped(self) -> dict[str, Any]:
        progress = self._job.progress
        counts = {name: getattr(progress, name) for name in ("rows", "ok", "skipped", "error")}
        measured = self._measured()
        return {
            "status": "stopped",
            **counts,
            **measured,
            "output": self._config.job.output,
            "exit_code": self._stop.exit_code,
        }

    def _measured(self) -> dict[str, float]:
        seconds = time.monotonic() - self._began
        return {"seconds": round(seconds, 3), "tokens_per_second": round(self._loaded.tokens / max(seconds, 1e-9), 1)}
