"""How far a job is: over all, and within the units that are still open. In memory only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from jobs.parts import Envelope
from jobs.plan import RowKey, Unit


@dataclass(frozen=True, slots=True)
class Progress:
    """Rows finished so far, in this attempt and earlier ones, by status; and the units committed."""

    rows: int
    ok: int
    skipped: int
    error: int
    units: int

    @classmethod
    def of(cls, counts: Counter[str], units: int) -> Progress:
        return cls(counts.total(), counts["ok"], counts["skipped"], counts["error"], units)


@dataclass(slots=True)
class OpenUnit:
    """A unit with rows unfinished, or with more rows to come (then `complete` is None)."""

    finished: frozenset[RowKey]  # by earlier attempts
    counts: Counter[str]
    waiting: set[RowKey] = field(default_factory=set)
    held: dict[RowKey, Envelope] = field(default_factory=dict)  # finished rows without a file of their own
    complete: Unit | None = None

    @classmethod
    def of(cls, saved: Iterable[Envelope]) -> OpenUnit:
        envelopes = list(saved)
        keys = frozenset(envelope.key for envelope in envelopes)
        return cls(keys, Counter(envelope.status for envelope in envelopes))
