"""JSON that holds whatever users' data hold."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.encoding import decode, encode


@pytest.mark.parametrize(
    "value",
    [
        {"text": "naïve 日本語 😀 \u2028 \x1b[31m </script>", "n": None, "list": [1, 1.5, True]},
        {"torn": "a\ud800b", "other": "😀"},
        {"id": 2**70, "negative": -(2**64), "int64": 2**63 - 1},
        {"float": 0.1 + 0.2, "tiny": 5e-324},
    ],
)
def test_round_trip_is_exact(value: Any) -> None:
    line = encode(value)
    assert b"\n" not in line
    assert decode(line) == value


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_json_cannot_say_is_null_with_either_encoder(number: float) -> None:
    assert decode(encode({"x": number})) == {"x": None}
    assert decode(encode({"x": number, "torn": "\ud800"})) == {"x": None, "torn": "\ud800"}


def test_what_is_no_json_value_is_a_bug_of_the_caller() -> None:
    with pytest.raises(TypeError):
        encode({"x": object()})
    with pytest.raises(ValueError):
        decode(b'{"torn')
