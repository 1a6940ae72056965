"""The record of a row, whatever became of it; keys whose value is None are left out when it is written."""

from dataclasses import asdict
from typing import Any

from pipeline.config import SCHEMA_VERSION
from pipeline.rows import DocumentError, Row
from pipeline.taskrun import Finished

_LONGEST_MESSAGE = 2000


def unread_record(row: Row, model: str) -> dict[str, Any]:
    """For a row without text: skipped, or in error."""
    if row.error is not None:
        return _record(row, "error", model, error={"type": row.error.type, "message": row.error.message})
    return _record(row, "skipped", model, reason=row.skip_reason)


def finished_record(finished: Finished, model: str) -> dict[str, Any]:
    """For a row that a task has worked on."""
    row, usage = finished.document.row_, asdict(finished.usage)
    if finished.error is not None:
        return _record(row, "error", model, usage=usage, error=_error(finished.error))
    assert finished.result is not None
    if not usage["segments"]:
        return _record(row, "skipped", model, reason="empty text")
    if not finished.result.summary:
        error = {"type": "EmptyAnswer", "message": "the model ended its answer before the first word"}
        return _record(row, "error", model, usage=usage, error=error)
    notes = finished.result.notes
    shown = None if notes is None else [asdict(note) for note in notes]
    return _record(row, "ok", model, summary=finished.result.summary, notes=shown, usage=usage)


def _error(error: Exception) -> dict[str, str]:
    kind = error.type if isinstance(error, DocumentError) else type(error).__name__
    return {"type": kind, "message": (str(error) or kind)[:_LONGEST_MESSAGE]}


def _record(row: Row, status: str, model: str, **values: Any) -> dict[str, Any]:
    return {
        "id": row.id,
        "source": row.source,
        "row": row.ordinal,
        "status": status,
        "reason": values.get("reason"),
        "summary": values.get("summary"),
        "notes": values.get("notes"),
        "fields": row.fields or None,
        "usage": values.get("usage"),
        "model": model,
        "error": values.get("error"),
        "schema_version": SCHEMA_VERSION,
    }
