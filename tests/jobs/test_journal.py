"""Finished rows and named states of open units."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.errors import CorruptJobError
from jobs.journal import Journal
from jobs.parts import Envelope
from jobs.plan import RowKey
from jobs.store import LocalStore

A, B = RowKey(0, 1), RowKey(2, 1_234_567_890)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(LocalStore(tmp_path))


def test_finished_rows_come_back_by_key(journal: Journal) -> None:
    found = {key: Envelope(key, "ok", {"key": list(key), "torn": "\udfff"}) for key in (A, B)}
    for envelope in found.values():
        journal.save_row(5, envelope)
    assert journal.saved_rows(5) == found
    assert journal.saved_rows(6) == {}
    assert journal.units() == [5]


def test_the_first_result_of_a_row_stays(journal: Journal) -> None:
    journal.save_row(5, Envelope(A, "ok", {"n": 1}))
    journal.save_row(5, Envelope(A, "error", {"n": 2}))
    assert journal.saved_rows(5)[A].record == {"n": 1}


def test_states_are_replaced_and_kept_apart(journal: Journal) -> None:
    journal.save_state(5, A, "journal", b"1")
    journal.save_state(5, A, "journal", b"2")
    journal.save_state(5, A, "snapshot.0", b"\x00\xff")
    journal.save_state(5, B, "journal", b"3")
    assert journal.load_state(5, A, "journal") == b"2"
    assert journal.load_state(5, A, "snapshot.0") == b"\x00\xff"
    assert journal.load_state(5, B, "snapshot.0") is None
    assert journal.state_names(5, A) == ["journal", "snapshot.0"]
    journal.drop_state(5, A, "journal")
    assert journal.state_names(5, A) == ["snapshot.0"]
    assert journal.saved_rows(5) == {}


def test_states_go_when_their_row_is_finished(journal: Journal) -> None:
    journal.save_state(5, A, "journal", b"a")
    journal.save_state(5, B, "journal", b"b")
    journal.save_row(5, Envelope(A, "ok", {}))
    assert journal.state_names(5, A) == []
    assert journal.state_names(5, B) == ["journal"]


def test_forgetting_a_unit_leaves_the_others(journal: Journal) -> None:
    for unit in (5, 6):
        journal.save_row(unit, Envelope(A, "ok", {}))
        journal.save_state(unit, B, "journal", b"")
    journal.forget(5)
    assert journal.units() == [6]
    assert list(journal.saved_rows(6)) == [A]


@pytest.mark.parametrize("name", ["row", "", "../x", "a/b", "Upper", ".hidden"])
def test_names_that_are_refused(journal: Journal, name: str) -> None:
    with pytest.raises(ValueError, match="no name for a state"):
        journal.save_state(5, A, name, b"")


def test_torn_files_are_no_rows_and_damaged_ones_are_named(journal: Journal, tmp_path: Path) -> None:
    journal.save_row(5, Envelope(A, "ok", {}))
    (path,) = (tmp_path / "state" / "000005").iterdir()
    path.with_name(f".tmp-0123456789abcdef-{path.name}").write_bytes(b"{")
    assert list(journal.saved_rows(5)) == [A]
    journal.sweep(5)
    assert list(path.parent.iterdir()) == [path]
    path.write_bytes(b"{")
    with pytest.raises(CorruptJobError, match=path.name):
        journal.saved_rows(5)
