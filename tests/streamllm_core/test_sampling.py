"""The next token: the right distribution, from random numbers that depend on nothing but their keys."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from streamllm_core import Request, Sampling, StreamingModel
from streamllm_core.sampling import choose
from tests.streamllm_core.tiny_engines import SINKS, random_tokens, run, small_engine

DRAWS = 1500
PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])


def frequencies(logits: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> list[float]:
    """How often each token is drawn, over many documents, questions and places."""
    drawn = Counter(
        choose(logits, Sampling(temperature, top_p, seed=3, key=("book", number // 20)), number % 20)
        for number in range(DRAWS)
    )
    return [drawn[token] / DRAWS for token in range(len(logits))]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1.0, [0, 1, 2, 3, 4]),
        (0.86, [1, 2, 3, 4]),
        (0.84, [1, 3, 4]),
        (0.5, [1, 3]),
        (0.41, [1, 3]),
        (0.39, [1]),
        (1e-9, [1]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: list[int]) -> None:
    found = frequencies(PROBABILITIES.log(), top_p=top_p)
    total = sum(float(PROBABILITIES[token]) for token in kept)
    for token, share in enumerate(found):
        wanted = float(PROBABILITIES[token]) / total if token in kept else 0.0
        assert abs(share - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / DRAWS) + 1e-9


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 1e6])
def test_temperature_scales_the_logits(temperature: float) -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0])
    found = frequencies(logits, temperature)
    for share, wanted in zip(found, torch.softmax(logits / temperature, 0).tolist(), strict=True):
        assert abs(share - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / DRAWS)


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1e-30, 5e-324])
def test_no_temperature_and_next_to_none_are_greedy(temperature: float) -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 1.9, -5.0])
    assert {choose(logits, Sampling(temperature, seed=seed), seed) for seed in range(50)} == {2}


def test_a_token_that_is_impossible_is_never_drawn() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 1.0, float("-inf")])
    found = frequencies(logits, temperature=100.0)
    assert found[0] == found[2] == found[4] == 0
    assert min(found[1], found[3]) > 0.4


def test_equal_probabilities_are_cut_in_the_order_of_the_vocabulary() -> None:
    found = frequencies(torch.zeros(4), top_p=0.5)
    assert min(found[:2]) > 0.4
    assert found[2:] == [0.0, 0.0]


def test_large_vocabularies_and_extreme_logits_work() -> None:
    logits = torch.full((50_000,), -1e30)
    logits[77] = 1e30
    assert choose(logits, Sampling(1.0, 0.9), 0) == 77
    assert 0 <= choose(torch.zeros(50_000), Sampling(1.0), 0) < 50_000


def test_draws_stay_what_they_are() -> None:
    """A resumed job must draw what it drew before, with another version, on another machine."""
    drawn = [choose(PROBABILITIES.log(), Sampling(1.0, 1.0, 7, ("a", 1)), number) for number in range(16)]
    assert drawn == [1, 1, 1, 1, 3, 3, 1, 1, 1, 3, 4, 0, 3, 1, 0, 4]


def test_seed_key_and_place_each_change_the_draws() -> None:
    logits = torch.zeros(1000)

    def draws(sampling: Sampling, first: int = 0) -> list[int]:
        return [choose(logits, sampling, number) for number in range(first, first + 20)]

    base = draws(Sampling(1.0, 1.0, 1, ("a", 1)))
    assert draws(Sampling(1.0, 1.0, 1, ("a", 1))) == base
    others = [
        Sampling(1.0, 1.0, 2, ("a", 1)),
        Sampling(1.0, 1.0, 1, ("a", 2)),
        Sampling(1.0, 1.0, 1, ("a", "1")),
        Sampling(1.0, 1.0, 1, ("a1",)),
        Sampling(1.0, 1.0, 1, (1, "a")),
        Sampling(1.0, 1.0, 1),
    ]
    for other in others:
        assert sum(one == two for one, two in zip(draws(other), base, strict=True)) < 4
    assert draws(Sampling(1.0, 1.0, 1, ("a", 1)), 1)[:-1] == base[1:]


def test_one_documents_draws_do_not_depend_on_the_others(llama: StreamingModel) -> None:
    """Alone, beside others, behind others, in small passes: the same tokens."""
    text = random_tokens(40)

    def answer(before: int, behind: int, pass_tokens: int) -> list[int]:
        engine = small_engine(llama, streams=8, pass_tokens=pass_tokens)

        def request(number: int, tokens: list[int]) -> Request:
            sampling = Sampling(1.2, 0.9, seed=5, key=("document", number))
            return Request(engine.open(sinks=SINKS), tokens, max_new_tokens=20, sampling=sampling)

        others = [request(9 + number, random_tokens(5 + 9 * number, number)) for number in range(before + behind)]
        mine = request(1, text)
        run(engine, *others[:before], mine, *others[before:])
        return mine.generated

    alone = answer(0, 0, 12)
    assert len(set(alone)) > 5
    assert answer(3, 0, 12) == alone
    assert answer(0, 3, 12) == alone
    assert answer(2, 2, 200) == alone


@pytest.mark.parametrize(
    "arguments", [(-0.1, 1.0), (float("nan"), 1.0), (1.0, 0.0), (1.0, 1.1), (1.0, float("nan")), (float("inf"), 1.0)]
)
def test_senseless_settings_are_refused(arguments: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Sampling(*arguments)
