"""Questions asked in passing: the stream never knows, and the window holds while the answer grows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from streamllm_core import Request, StreamingModel, WindowError
from streamllm_core.kernels.sink_window_torch import visible
from streamllm_core.layout import Run
from tests.streamllm_core.tiny_engines import HEADROOM, SINKS, WINDOW, random_tokens, read, run, small_engine

# With a headroom of 56 the ring has 80 rows behind 4 sinks: before the window is full, before and while the ring wraps
# for the first time (in the excursion, right after it, at its very border), long after.
PHASES = (1, 27, 60, 83, 84, 85, 170)


def difference(engine_model: StreamingModel, length: int, question: int, answer: int) -> tuple[Tensor, Tensor]:
    """Logits of what is read after ``length`` tokens, with a question asked in between and without."""
    text, more = random_tokens(length), random_tokens(70, 1)

    def outcome(asked: bool) -> Tensor:
        headroom = question + answer - 1
        engine = small_engine(engine_model, excursion=headroom, micro_tokens=8)
        assert engine.cache.headroom == headroom
        stream = engine.open(sinks=SINKS)
        read(engine, stream, text)
        if asked:
            request = Request(stream, random_tokens(question, 2), max_new_tokens=answer, excursion=True)
            run(engine, request)
            assert len(request.generated) == answer
            assert stream.length == length
        return torch.cat([read(engine, stream, more[:1]), read(engine, stream, more[1:])])

    return outcome(True), outcome(False)


@pytest.mark.parametrize("length", PHASES)
def test_after_50_generated_tokens_nothing_was_ever_asked(llama: StreamingModel, length: int) -> None:
    asked, plain = difference(llama, length, question=7, answer=50)
    assert torch.equal(asked, plain)


@pytest.mark.parametrize("length", (2, 25, 70))
def test_sliding_layers_are_rewound_too(mixed: StreamingModel, length: int) -> None:
    asked, plain = difference(mixed, length, question=7, answer=20)
    assert torch.equal(asked, plain)


@pytest.mark.parametrize("question", [1, 9, 40])
def test_a_question_of_any_length_is_forgotten(llama: StreamingModel, question: int) -> None:
    asked, plain = difference(llama, 77, question, answer=max(1, 12 - question))
    assert torch.equal(asked, plain)


def test_many_excursions_leave_no_trace_while_others_read(llama: StreamingModel) -> None:
    """The document's own passes are alone; those of its questions are shared with another document."""
    text = random_tokens(150)

    def outcome(asked: bool) -> Tensor:
        engine = small_engine(llama)
        stream, other = engine.open(sinks=SINKS), engine.open(sinks=SINKS)
        parts = []
        for start in range(0, 150, 25):
            parts.append(read(engine, stream, text[start : start + 25]))
            if asked:
                beside = Request(other, random_tokens(30, start))
                run(engine, Request(stream, random_tokens(6, start), max_new_tokens=11, excursion=True), beside)
        return torch.cat(parts)

    assert torch.equal(outcome(True), outcome(False))


def test_the_answer_is_the_one_that_a_fork_gives(llama: StreamingModel) -> None:
    engine = small_engine(llama)
    stream = engine.open(sinks=SINKS)
    read(engine, stream, random_tokens(90))
    asked = Request(engine.fork(stream), random_tokens(6, 1), max_new_tokens=11)
    run(engine, asked)
    for _ in range(2):
        excursion = Request(stream, random_tokens(6, 1), max_new_tokens=11, excursion=True)
        run(engine, excursion)
        assert excursion.generated == asked.generated


@pytest.mark.parametrize("stop_at", [0, 4])
def test_an_answer_that_stops_early_is_rewound_too(llama: StreamingModel, stop_at: int) -> None:
    engine = small_engine(llama)
    stream = engine.open(sinks=SINKS)
    read(engine, stream, random_tokens(60))
    free = Request(stream, [3, 4], max_new_tokens=10, excursion=True)
    run(engine, free)
    stop = frozenset({free.generated[stop_at]})
    early = Request(stream, [3, 4], max_new_tokens=10, excursion=True, stop=stop)
    run(engine, early)
    assert early.finish_reason == "stop"
    assert stream.length == 60
    assert stream.marked is None


def test_one_token_more_than_the_headroom_is_refused(llama: StreamingModel) -> None:
    engine = small_engine(llama)
    stream = engine.open(sinks=SINKS)
    read(engine, stream, random_tokens(60))
    last = stream.last_hidden
    for question, answer in ((HEADROOM + 1, 0), (HEADROOM + 1, 1), (HEADROOM, 2), (1, HEADROOM + 1)):
        with pytest.raises(WindowError, match=f"excursion of {HEADROOM + 1} tokens exceeds the {HEADROOM}"):
            engine.submit(Request(stream, random_tokens(question), max_new_tokens=answer, excursion=True))
    assert (stream.length, stream.marked) == (60, None)
    assert stream.last_hidden is last
    for question, answer in ((HEADROOM, 0), (HEADROOM, 1), (1, HEADROOM)):
        run(engine, Request(stream, random_tokens(question), max_new_tokens=answer, excursion=True))


def test_one_token_more_by_hand_is_refused_before_it_is_written(llama: StreamingModel) -> None:
    text, more = random_tokens(60), random_tokens(50, 1)
    engine, plain = small_engine(llama), small_engine(llama)
    streams = engine.open(sinks=SINKS), plain.open(sinks=SINKS)
    for one, stream in zip((engine, plain), streams, strict=True):
        read(one, stream, text)
    mark = streams[0].mark()
    read(engine, streams[0], random_tokens(HEADROOM, 2))
    with pytest.raises(WindowError, match=f"{HEADROOM + 1} tokens"):
        engine.forward([(streams[0], [1])])
    streams[0].rewind(mark)
    assert torch.equal(read(engine, streams[0], more), read(plain, streams[1], more))


def test_an_eviction_within_an_excursion_is_forgotten(llama: StreamingModel) -> None:
    text, more = random_tokens(60), random_tokens(50, 1)

    def outcome(evict: bool) -> Tensor:
        engine = small_engine(llama)
        stream = engine.open(sinks=SINKS)
        read(engine, stream, text)
        engine.evict(stream, 45, 47)
        if evict:
            mark = stream.mark()
            read(engine, stream, more[:10])
            engine.evict(stream, 50, 65)
            read(engine, stream, more[:3])
            stream.rewind(mark)
        return read(engine, stream, more)

    assert torch.equal(outcome(True), outcome(False))


# --- the window rule: segment + question + answer <= R ---------------------------------------------------------


@pytest.mark.parametrize("before", [0, 3, 40, 1000])
@pytest.mark.parametrize(("total", "seen"), [(WINDOW, True), (WINDOW + 1, True), (WINDOW + 2, False)])
def test_a_segments_first_token_is_seen_by_the_last_of_the_answer(
    load: object, before: int, total: int, seen: bool
) -> None:
    """``total`` is segment + question + answer. The rule total <= R keeps one token in reserve: a query sees R tokens
    before itself, and those after a segment's first are segment + question + answer - 1."""
    question, answer = 5, 7
    start = SINKS + before  # of the segment
    last = start + total - 1  # the answer's last token
    ring = small_engine(load(3), streams=1).cache.layers[0]  # type: ignore[operator]
    query = Run(0, 0, 1, last, SINKS)
    rows = ring.used(SINKS, last + 1)
    marks = visible(ring, [query], rows).flatten().tolist()
    held = [position for position in range(last + 1) if position < SINKS or last - position <= ring.recent]
    assert sum(marks) == len(held)
    assert (start in held) == seen
    assert total - question - answer > 0


@pytest.mark.parametrize(("total", "seen"), [(WINDOW, True), (WINDOW + 1, True), (WINDOW + 2, False)])
@pytest.mark.parametrize("fact", [0, 19])
def test_a_fact_in_a_segments_first_20_tokens_reaches_the_last_of_the_answer(
    load: object, device: str, total: int, seen: bool, fact: int
) -> None:
    """Shown by its effect: in a model of one layer a token changes another's state only if it is seen by it.

    The fact is one token; the segment starts so late that everything before it has left the window.
    """
    question, answer = 2, 2
    model = load(1, device)  # type: ignore[operator]
    segment = total - question - answer + fact  # so that the fact is as old as a segment's first token
    pin, asked = random_tokens(SINKS, 3), random_tokens(question + answer, 4)

    def outcome(word: int) -> Tensor:
        engine = small_engine(model, window=WINDOW)
        stream = engine.open(pin)
        read(engine, stream, random_tokens(61, 5))
        body = random_tokens(segment, 6)
        body[fact] = word
        read(engine, stream, body)
        mark = stream.mark()
        states = read(engine, stream, asked)
        stream.rewind(mark)
        return states[-1]

    assert torch.equal(outcome(1), outcome(2)) != seen
