"""Differences are found in every field and can be read."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.fingerprint import Difference, describe, differences

BASE: dict[str, Any] = {
    "inputs": [{"path": "a.jsonl", "size": 10}, {"path": "b.jsonl", "size": 20}],
    "model": {"name": "m", "commit": None},
    "window": 2048,
    "prompts": {},
}


def changed(**fields: Any) -> dict[str, Any]:
    return {**BASE, **fields}


def test_the_same_is_no_difference() -> None:
    assert differences(BASE, {**BASE, "inputs": tuple(BASE["inputs"])}) == []


@pytest.mark.parametrize(
    ("now", "found"),
    [
        (changed(window=1024), Difference("window", "2048", "1024")),
        (changed(window="2048"), Difference("window", "2048", '"2048"')),
        (changed(model={"name": "m", "commit": "c0ffee"}), Difference("model.commit", "null", '"c0ffee"')),
        (changed(model={"name": "m"}), Difference("model.commit", "null", "(absent)")),
        (changed(dtype="bf16"), Difference("dtype", "(absent)", '"bf16"')),
        (changed(prompts=[]), Difference("prompts", "{}", "[]")),
    ],
)
def test_each_difference_names_its_field(now: dict[str, Any], found: Difference) -> None:
    assert differences(BASE, now) == [found]


def test_lists_are_compared_item_by_item() -> None:
    now = changed(inputs=[BASE["inputs"][0], {"path": "b.jsonl", "size": 21}])
    assert differences(BASE, now) == [Difference("inputs[1].size", "20", "21")]
    assert [d.field for d in differences(BASE, changed(inputs=BASE["inputs"][:1]))] == [
        "inputs[1].path",
        "inputs[1].size",
    ]


def test_long_values_are_cut_where_they_differ() -> None:
    then, now = "word " * 200 + "old ending" + " tail" * 50, "word " * 200 + "new ending" + " tail" * 50
    (difference,) = differences({"prompt": then}, {"prompt": now})
    assert "old ending" in difference.then and "new ending" in difference.now
    assert max(len(difference.then), len(difference.now)) < 80


def test_many_differences_are_counted() -> None:
    then = {f"f{number}": "then" for number in range(50)}
    text = describe(differences(then, dict.fromkeys(then, "now")))
    assert "f19" in text and "f20" not in text and "30 more" in text
