"""The ids that a stream remembers, against a list that forgets nothing."""

from __future__ import annotations

import random

import pytest

from streamllm_core import Request, StreamingModel
from streamllm_core.history import History
from tests.streamllm_core.tiny_engines import HEADROOM, SINKS, WINDOW, random_tokens, run, small_engine


@pytest.mark.parametrize("seed", range(10))
def test_it_shows_the_last_tokens_whatever_is_taken_back(seed: int) -> None:
    chance = random.Random(seed)
    visible, headroom = chance.randint(1, 30), chance.randint(1, 20)
    history, whole = History(visible, headroom), []
    reach = 0
    for _ in range(200):
        tokens = chance.choices(range(1000), k=chance.choice([1, 1, 2, 9, 100]))
        history.write(len(whole), tokens)
        whole += tokens
        reach = max(reach, len(whole))
        back = chance.randint(0, min(headroom - (reach - len(whole)), len(whole)))
        whole = whole[: len(whole) - back]
        assert history.last(len(whole)).tolist() == whole[-visible:][: len(whole)]


def test_a_copy_goes_its_own_way() -> None:
    history = History(4, 2)
    history.write(0, [1, 2, 3, 4, 5])
    copy = history.copy()
    copy.write(5, [6])
    history.write(5, [7])
    assert history.last(6).tolist() == [3, 4, 5, 7]
    assert copy.last(6).tolist() == [3, 4, 5, 6]


def test_one_that_was_given_no_room_is_empty() -> None:
    assert History().last(9).tolist() == []


def test_streams_remember_what_they_read_through_all_that_happens_to_them(llama: StreamingModel) -> None:
    engine = small_engine(llama, draft_tokens=3)
    pin, text = random_tokens(SINKS, 1), random_tokens(70, 2)
    stream = engine.open(pin)
    assert stream.history.last(stream.length).tolist() == pin
    run(engine, Request(stream, text))
    expected = (pin + text)[-WINDOW:]
    run(engine, Request(stream, random_tokens(6, 3), max_new_tokens=HEADROOM - 5, excursion=True))
    fork = engine.fork(stream)
    restored = engine.restore(engine.snapshot(stream))
    for each in (stream, fork, restored):
        assert each.history.last(each.length).tolist() == expected
    answer = Request(fork, [5], max_new_tokens=HEADROOM + 20)  # what the stream remembers is out of its reach
    run(engine, answer)
    assert fork.history.last(fork.length).tolist() == [*expected, 5, *answer.generated[:-1]][-WINDOW:]
    assert stream.history.last(stream.length).tolist() == expected
    assert engine.open(pin).history.last(SINKS).tolist() == pin  # a pin that is copied brings its ids along
