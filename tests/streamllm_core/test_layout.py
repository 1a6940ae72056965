"""Micro-batches: every row of a pass, once, in order, and never across the end of a pinned prefix."""

from __future__ import annotations

import random

import pytest
import torch

from streamllm_core.layout import MicroBatch, Run, micro_batches

CPU = torch.device("cpu")


def random_runs(chance: random.Random) -> list[Run]:
    count = chance.randint(1, 6)
    return [
        Run(slot, 0, chance.randint(1, 20), chance.choice([0, 1, 3, 7, 50]), chance.choice([0, 1, 4, 9]), ((12, 14),))
        for slot in chance.sample(range(10), count)
    ]


@pytest.mark.parametrize("chunk", [None, 1, 4, 100])
@pytest.mark.parametrize("seed", range(30))
def test_micro_batches_hold_each_token_of_a_pass_once(seed: int, chunk: int | None) -> None:
    chance = random.Random(seed)
    runs, limit = random_runs(chance), chance.randint(1, 25)
    asked = [(run.slot, token, run.sinks) for run in runs for token in range(run.start, run.stop)]

    batches = micro_batches(runs, limit, CPU, chunk)

    found: list[tuple[int, int, int]] = []
    places: list[int] = []
    for batch in batches:
        assert batch.first == len(found)
        assert batch.tokens <= limit
        assert [run.offset for run in batch.runs] == [
            sum(run.count for run in batch.runs[:index]) for index in range(len(batch.runs))
        ]
        assert all(run.count > 0 and run.holes == ((12, 14),) for run in batch.runs)
        for slot in {run.slot for run in batch.runs}:
            assert sum(run.count for run in batch.runs if run.slot == slot) <= (chunk or limit)
        found += zip(batch.slots.tolist(), batch.positions.tolist(), batch.sinks.tolist(), strict=True)
        places += [place for rows in batch.taken for place in rows]
    assert [asked[place] for place in places] == found  # each row is the token that it says it is
    assert sorted(places) == list(range(len(asked)))
    for run in runs:  # keys are written before they are attended to
        assert [token for slot, token, _ in found if slot == run.slot] == list(range(run.start, run.stop))
    if chunk is None or chunk >= limit:
        assert all(batch.tokens == limit for batch in batches[:-1])  # no room is left unused


def test_short_pieces_of_many_streams_share_a_micro_batch() -> None:
    batches = micro_batches([Run(slot, 0, 6, 0, 0) for slot in range(4)], 12, CPU, 3)
    assert [batch.tokens for batch in batches] == [12, 12]


@pytest.mark.parametrize("seed", range(20))
def test_no_run_holds_both_pinned_and_other_tokens(seed: int) -> None:
    chance = random.Random(seed)
    for batch in micro_batches(random_runs(chance), chance.randint(1, 25), CPU):
        for run in batch.runs:
            assert run.stop <= run.sinks or run.start >= run.sinks


def test_tensors_have_a_row_for_each_token() -> None:
    batch = MicroBatch([Run(5, 0, 3, 2, 5), Run(2, 3, 1, 77, 0)], 0, CPU)
    assert batch.tokens == 4
    assert batch.positions.tolist() == [2, 3, 4, 77]
    assert batch.slots.tolist() == [5, 5, 5, 2]
    assert batch.sinks.tolist() == [5, 5, 5, 0]
    assert batch.positions.dtype == torch.int64


def test_positions_stay_exact_far_beyond_int32() -> None:
    far = 2**33 + 1
    assert MicroBatch([Run(0, 0, 2, far, 4)], 0, CPU).positions.tolist() == [far, far + 1]


def test_memo_builds_once_for_each_key() -> None:
    batch = MicroBatch([Run(0, 0, 1, 0, 0)], 0, CPU)
    built: list[str] = []

    def build(name: str) -> str:
        built.append(name)
        return name

    assert [batch.memo(("a", 1), lambda: build("first")) for _ in range(3)] == ["first"] * 3
    assert batch.memo(("a", 2), lambda: build("second")) == "second"
    assert built == ["first", "second"]


def test_memo_of_one_micro_batch_is_not_another_ones() -> None:
    first, second = micro_batches([Run(0, 0, 4, 0, 0)], 2, CPU)
    assert first.memo("positions", lambda: first.positions.tolist()) == [0, 1]
    assert second.memo("positions", lambda: second.positions.tolist()) == [2, 3]
