"""Evicted spans against a dense float64 model that lists, token by token, what is hidden."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from streamllm_core import Engine, Request, Stream, StreamingModel
from streamllm_core.cache import MAX_HOLES
from tests.streamllm_core.dense_reference import DenseLlama, Eviction
from tests.streamllm_core.tiny_engines import SINKS, WINDOW, random_tokens, read, run, small_engine

TOLERANCE = {"cpu": 2e-4, "cuda": 1e-3}


def read_evicting(
    engine: Engine, stream: Stream, tokens: list[int], evictions: list[Eviction], chance: random.Random
) -> Tensor:
    """Logits of ``tokens``, in chunks of random sizes that end where an eviction comes."""
    borders = sorted({when for when, _, _ in evictions} | {len(tokens)})
    parts = []
    for border in borders:
        while stream.length < border:
            size = min(chance.randint(1, 20), border - stream.length)
            parts.append(read(engine, stream, tokens[stream.length : stream.length + size], 20))
        for when, start, stop in evictions:
            if when == border:
                engine.evict(stream, start, stop)
    return torch.cat(parts)


def random_evictions(chance: random.Random, length: int) -> list[Eviction]:
    """Spans of the window, at moments that let holes touch, overlap and leave; never more than eight at a time."""
    evictions: list[Eviction] = []
    for when in sorted(chance.sample(range(SINKS + 5, length), 12)):
        start = chance.randint(max(SINKS, when - WINDOW - 3), when - 1)
        evictions.append((when, start, min(when, start + chance.randint(1, 6))))
    return evictions


@pytest.mark.parametrize("seed", range(5))
def test_random_holes_equal_the_dense_reference(llama: StreamingModel, dense: DenseLlama, seed: int) -> None:
    chance = random.Random(seed)
    tokens = random_tokens(130, seed)
    evictions = random_evictions(chance, len(tokens))
    engine = small_engine(llama, pass_tokens=20, micro_tokens=chance.choice([3, 16]))
    stream = engine.open(sinks=SINKS)
    logits = read_evicting(engine, stream, tokens, evictions, chance)
    wanted = dense.logits(tokens, sinks=SINKS, window=WINDOW, evictions=evictions)
    assert (logits - wanted).abs().max() < TOLERANCE[llama.device.type]
    unmasked = dense.logits(tokens, sinks=SINKS, window=WINDOW)
    assert (logits - unmasked).abs().max() > 0.1  # the holes do matter


@pytest.mark.parametrize("step", [1, 7, 60])
def test_eight_holes_in_one_window_equal_the_dense_reference(
    llama: StreamingModel, dense: DenseLlama, step: int
) -> None:
    tokens = random_tokens(120)
    evictions = [(60, 36 + 3 * number, 37 + 3 * number) for number in range(MAX_HOLES)]
    engine = small_engine(llama)
    stream = engine.open(sinks=SINKS)
    before = read(engine, stream, tokens[:60])
    for _, start, stop in evictions:
        engine.evict(stream, start, stop)
    assert len(stream.holes) == MAX_HOLES
    with pytest.raises(ValueError, match="more than 8"):
        engine.evict(stream, 59, 60)
    after = read(engine, stream, tokens[60:], step)  # … until all of them have left the window
    wanted = dense.logits(tokens, sinks=SINKS, window=WINDOW, evictions=evictions)
    assert (torch.cat([before, after]) - wanted).abs().max() < TOLERANCE[llama.device.type]


def test_everything_but_the_sinks_can_be_evicted(llama: StreamingModel, dense: DenseLlama) -> None:
    """The next token sees the sinks and itself: as if it stood right behind a window that is empty."""
    tokens = random_tokens(80)
    evictions = [(50, SINKS, 50)]
    engine = small_engine(llama)
    stream = engine.open(sinks=SINKS)
    logits = read_evicting(engine, stream, tokens, evictions, random.Random(0))
    wanted = dense.logits(tokens, sinks=SINKS, window=WINDOW, evictions=evictions)
    assert (logits - wanted).abs().max() < TOLERANCE[llama.device.type]


def test_everything_can_be_evicted_from_a_stream_without_sinks(llama: StreamingModel, dense: DenseLlama) -> None:
    tokens = random_tokens(80)
    evictions = [(50, 10, 50)]
    engine = small_engine(llama)
    stream = engine.open()
    logits = read_evicting(engine, stream, tokens, evictions, random.Random(0))
    wanted = dense.logits(tokens, sinks=0, window=WINDOW, evictions=evictions)
    assert (logits - wanted).abs().max() < TOLERANCE[llama.device.type]


def test_holes_of_one_stream_are_not_its_neighbours(llama: StreamingModel) -> None:
    """Decoding streams share a product; each has its own holes, or none."""
    texts = [random_tokens(length, length) for length in (50, 61, 33)]
    spans = ([(40, 44), (46, 47)], [], [(10, 30)])

    def answers(together: bool) -> list[list[int]]:
        engine = small_engine(llama)
        requests = []
        for text, holes in zip(texts, spans, strict=True):
            stream = engine.open(sinks=SINKS)
            read(engine, stream, text)
            for start, stop in holes:
                engine.evict(stream, start, stop)
            requests.append(Request(stream, [1], max_new_tokens=12))
            if not together:
                run(engine, requests[-1])
        if together:
            run(engine, *requests)
        return [request.generated for request in requests]

    assert answers(True) == answers(False)


def test_eviction_while_a_request_is_running_holds_from_the_next_pass_on(
    llama: StreamingModel, dense: DenseLlama
) -> None:
    tokens = random_tokens(60)
    engine = small_engine(llama, pass_tokens=20)
    request = Request(engine.open(sinks=SINKS), tokens)
    engine.submit(request)
    engine.step()
    engine.step()
    assert request.stream.length == 40
    engine.evict(request.stream, 30, 38)
    engine.step()
    wanted = dense.logits(tokens, sinks=SINKS, window=WINDOW, evictions=[(40, 30, 38)])[-1]
    assert request.stream.last_hidden is not None
    logits = llama.head(request.stream.last_hidden[None])[0].cpu()
    assert (logits - wanted).abs().max() < TOLERANCE[llama.device.type]


@pytest.mark.parametrize(("sinks", "window"), [(0, 1), (4, 24), (30, 5), (9, 200)])
def test_without_holes_the_reference_and_the_engine_agree(
    llama: StreamingModel, dense: DenseLlama, sinks: int, window: int
) -> None:
    tokens = random_tokens(70)
    wanted = dense.logits(tokens, sinks=sinks, window=window)
    for chunk in (1, 13, 70):
        logits = llama.logits(torch.tensor([tokens]), sinks=sinks, window=window, chunk_tokens=chunk)[0]
        assert (logits - wanted).abs().max() < TOLERANCE[llama.device.type]


@pytest.mark.parametrize("sinks", [1, 2, 3])
def test_chunks_may_end_anywhere_round_the_last_pinned_token(
    llama: StreamingModel, dense: DenseLlama, sinks: int
) -> None:
    """Single tokens on both sides of it are two runs of one stream in one micro-batch."""
    tokens = random_tokens(8)
    wanted = dense.logits(tokens, sinks=sinks, window=2)
    for chunk in range(1, 6):
        for micro in range(1, 5):
            engine = small_engine(llama, window=2, pass_tokens=2 * chunk, micro_tokens=micro)
            one, other = engine.open(sinks=sinks), engine.open(sinks=sinks)
            for start in range(0, len(tokens), chunk):
                part = tokens[start : start + chunk]
                hidden = engine.forward([(one, part), (other, part)])
                logits = llama.head(hidden).cpu().view(2, len(part), -1)
                assert (logits - wanted[start : start + chunk]).abs().max() < TOLERANCE[llama.device.type]
