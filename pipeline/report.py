"""What a run tells while it runs (stderr), and what it says at the end: one JSON summary."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

_LINE_SECONDS = 30.0
_BAR_SECONDS = 0.2


@dataclass(frozen=True)
class State:
    """How far a run is. Tokens are this attempt's, read and written."""

    rows: int
    errors: int
    active: int
    tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Reporter:
    """Notes and progress on stderr: a bar on a terminal, elsewhere a line every 30 seconds; as JSON with `log_json`."""

    def __init__(self, *, quiet: bool = False, log_json: bool = False, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._json = log_json
        self._bar: Any = None
        self._shows_bar = not quiet and not log_json and self._stream.isatty()
        self._last = time.monotonic()

    def note(self, message: str) -> None:
        """One line, unless the run is to be quiet."""
        if not self._quiet:
            self._write("note", message)

    def error(self, message: str) -> None:
        """What went wrong; never held back."""
        self._write("error", message)

    def progress(self, state: State) -> None:
        """Show how far the run is, if it is time to."""
        now = time.monotonic()
        if self._quiet or now - self._last < (_BAR_SECONDS if self._shows_bar else _LINE_SECONDS):
            return
        self._last = now
        if self._shows_bar:
            self._draw(state)
            return
        line = f"{state.rows} rows done, {state.errors} with errors, {state.active} in work, {state.speed:.1f} tokens/s"
        self._write("progress", line, rows=state.rows, errors=state.errors, active=state.active, tokens=state.tokens)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _draw(self, state: State) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(file=self._stream, unit=" rows", leave=False, initial=state.rows, dynamic_ncols=True)
        self._bar.set_postfix_str(
            f"{state.active} in work, {state.errors} errors, {state.speed:.0f} tokens/s", refresh=False
        )
        self._bar.update(state.rows - self._bar.n)
        self._bar.refresh()

    def _write(self, kind: str, message: str, **more: object) -> None:
        if self._json:
            event = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": kind, "message": message, **more}
            message = json.dumps(event)
        if self._bar is not None:
            self._bar.clear()
        print(message, file=self._stream, flush=True)


class Totals:
    """Counts over all rows of the output, whichever attempt did them."""

    def __init__(self) -> None:
        self.rows = self.ok = self.skipped = self.error = 0
        self.input_tokens = self.output_tokens = 0
        self.damaged = 0

    def add(self, record: Mapping[str, Any]) -> None:
        self.rows += 1
        status = record["status"]
        self.ok += status == "ok"
        self.skipped += status == "skipped"
        self.error += status == "error"
        usage = record.get("usage") or {}
        self.input_tokens += usage.get("input_tokens", 0)
        self.output_tokens += usage.get("output_tokens", 0)
        self.damaged += (record.get("error") or {}).get("type") == "DamagedFile"

    def as_dict(self) -> dict[str, int]:
        """The counts under the names of the summary."""
        names = ("rows", "ok", "skipped", "error", "input_tokens", "output_tokens")
        return {name: getattr(self, name) for name in names}


def print_summary(summary: Mapping[str, Any]) -> None:
    """The last line on stdout: one JSON object, in ASCII so that any terminal and any path will do."""
    sys.stderr.flush()
    print(json.dumps(summary), flush=True)
