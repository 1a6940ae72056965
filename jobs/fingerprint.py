"""What a job's results depend on, compared field by field, so that a difference can be shown and not just noticed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jobs.encoding import decode, encode

_SHOWN = 20  # differences
_WIDTH = 72  # characters of a value
_ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Difference:
    """A field, as a path such as `inputs[2].size`, and its two values as text."""

    field: str
    then: str
    now: str


def normalize(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint as it reads after a trip through JSON, so that what was stored and what is new compare equal."""
    fields: dict[str, Any] = decode(encode(dict(fingerprint)))
    return fields


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Every field whose values differ, in the order of the fields; empty when the two say the same."""
    old, new = dict(_leaves("", normalize(then))), dict(_leaves("", normalize(now)))
    fields = [field for field in {**old, **new} if old.get(field) != new.get(field)]
    return [Difference(field, *_excerpts(old.get(field, _ABSENT), new.get(field, _ABSENT))) for field in fields]


def describe(found: list[Difference]) -> str:
    """The differences as indented lines: field, then, now."""
    lines = [line for d in found[:_SHOWN] for line in (f"  {d.field}", f"    then: {d.then}", f"    now:  {d.now}")]
    if len(found) > _SHOWN:
        lines.append(f"  and {len(found) - _SHOWN} more fields")
    return "\n".join(lines)


def _leaves(field: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{field}.{name}" if field else name, inner)
    elif isinstance(value, list) and value:
        for place, inner in enumerate(value):
            yield from _leaves(f"{field}[{place}]", inner)
    else:
        yield field, encode(value).decode()


def _excerpts(then: str, now: str) -> tuple[str, str]:
    """Both values, cut alike so that the first place where they differ is seen in long ones (prompts)."""
    same = next((i for i, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), min(len(then), len(now)))
    start = max(0, same - 20) if max(len(then), len(now)) > _WIDTH else 0

    def cut(text: str) -> str:
        piece = text[start : start + _WIDTH]
        return ("…" if start else "") + piece + ("…" if start + _WIDTH < len(text) else "")

    return cut(then), cut(now)
