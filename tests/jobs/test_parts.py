"""Parts hold what was committed, and say so when they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.errors import CorruptJobError
from jobs.parts import Envelope, MissingPartError, Parts
from jobs.plan import Row, RowKey, Unit
from jobs.store import LocalStore

UNIT = Unit(3, (Row(RowKey(0, 7), 10, 70), Row(RowKey(1, 0), 20), Row(RowKey(1, 1), 30, 20)))
ENVELOPES = [
    Envelope(RowKey(0, 7), "ok", {"summary": "line\nbreak \ud800 😀", "id": 2**70}),
    Envelope(RowKey(1, 0), "skipped", {"reason": "empty"}),
    Envelope(RowKey(1, 1), "ok", {}),
]


def parts(folder: Path, job: str = "j") -> Parts:
    return Parts(LocalStore(folder), job)


def test_a_part_gives_back_its_envelopes_and_its_rows(tmp_path: Path) -> None:
    committed = parts(tmp_path)
    assert committed.commit(UNIT, ENVELOPES) is True
    assert list(committed.read(3)) == ENVELOPES
    header = committed.header(3)
    assert (header.first, header.last, header.rows) == (UNIT.rows[0], UNIT.rows[-1], 3)
    assert header.counts == {"ok": 2, "skipped": 1}
    assert committed.committed() == {3: 0}
    assert committed.exists(3) and not committed.exists(4)


def test_a_part_is_never_changed(tmp_path: Path) -> None:
    parts(tmp_path).commit(UNIT, ENVELOPES)
    again = [Envelope(envelope.key, "error", {}) for envelope in ENVELOPES]
    assert parts(tmp_path).commit(UNIT, again) is False
    assert list(parts(tmp_path).read(3)) == ENVELOPES


def test_the_highest_generation_counts(tmp_path: Path) -> None:
    committed = parts(tmp_path)
    for generation in (0, 10, 9):
        committed.commit(UNIT, ENVELOPES, generation)
    assert committed.committed() == {3: 10}


@pytest.mark.parametrize("wrong", [ENVELOPES[:2], ENVELOPES[::-1], [*ENVELOPES, ENVELOPES[0]]])
def test_envelopes_of_other_rows_are_refused(tmp_path: Path, wrong: list[Envelope]) -> None:
    with pytest.raises(ValueError, match="not those of its rows"):
        parts(tmp_path).commit(UNIT, wrong)
    assert parts(tmp_path).committed() == {}


def test_any_changed_byte_is_found(tmp_path: Path) -> None:
    parts(tmp_path).commit(UNIT, ENVELOPES)
    (path,) = (tmp_path / "parts").iterdir()
    whole = path.read_bytes()
    body = whole.index(b"\n") + 1
    for damaged in (whole[:-1], whole[:body], whole[:body] + whole[body:].replace(b"empty", b"emptY"), b"", whole[5:]):
        path.write_bytes(damaged)
        with pytest.raises(CorruptJobError, match=r"parts/000003.g0.jsonl is damaged"):
            list(parts(tmp_path).read(3))


def test_a_part_of_another_job_is_refused(tmp_path: Path) -> None:
    parts(tmp_path, "one").commit(UNIT, ENVELOPES)
    with pytest.raises(CorruptJobError, match="belongs to another job"):
        parts(tmp_path, "two").header(3)


def test_a_missing_part(tmp_path: Path) -> None:
    with pytest.raises(MissingPartError, match="000003"):
        parts(tmp_path).header(3)


def test_status_is_one_of_three() -> None:
    with pytest.raises(ValueError, match="'done'"):
        Envelope(RowKey(0, 0), "done", {})
