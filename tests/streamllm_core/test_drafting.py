"""Drafted tokens: whatever is proposed, the answers are those of an engine that guesses nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from streamllm_core import AutoModel, Engine, EngineConfig, NgramDrafter, Request, Sampling, Stream, StreamingModel
from streamllm_core.drafting import adapted
from tests.streamllm_core.scripted_drafters import Script, ScriptedDrafter, lies, mixture, truth
from tests.streamllm_core.tiny_engines import HEADROOM, SINKS, WINDOW, random_tokens, read, run, small_engine

VOCABULARY = 97
LENGTHS = (1, 3, 9, 30, 57, 110)
ANSWERS = (40, 9, 1, 33, 2, 60)


def documents(engine: Engine, **options: Any) -> list[Request]:
    """Texts of all lengths, half of them repeating themselves."""
    return [
        Request(
            engine.open(sinks=SINKS),
            (random_tokens(7, number) * length)[:length] if number % 2 else random_tokens(length, number),
            max_new_tokens=answer,
            **options,
        )
        for number, (length, answer) in enumerate(zip(LENGTHS, ANSWERS, strict=True))
    ]


def sampled(requests: list[Request], temperature: float) -> list[Request]:
    for number, request in enumerate(requests):
        request.sampling = Sampling(temperature, 0.95, seed=5, key=("row", number)) if temperature else Sampling()
    return requests


def answer_all(
    model: StreamingModel, temperature: float, script: Script | None = None, **config: Any
) -> tuple[Engine, list[Request]]:
    engine = small_engine(model, streams=len(LENGTHS), **config)
    if script is not None:
        engine.drafter = ScriptedDrafter(script)
    requests = sampled(documents(engine), temperature)
    return engine, requests


def outcome(request: Request) -> tuple[Any, ...]:
    return request.generated, request.finish_reason, request.stopped_by, request.stream.length, request.pending


def assert_same(requests: list[Request], plain: list[Request]) -> None:
    assert [outcome(request) for request in requests] == [outcome(request) for request in plain]
    for request, other in zip(requests, plain, strict=True):
        assert request.stream.last_hidden is not None
        assert other.stream.last_hidden is not None
        assert torch.allclose(request.stream.last_hidden, other.stream.last_hidden, atol=2e-4)


def known(requests: list[Request], plain: list[Request]) -> dict[int, list[int]]:
    return {id(request.stream): other.generated for request, other in zip(requests, plain, strict=True)}


# --- the answers are the same ----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("drafts", "pass_tokens", "micro_tokens"), [(1, 200, 64), (3, 12, 5), (8, 60, 3), (20, 300, 9)]
)
def test_answers_do_not_depend_on_what_is_proposed(
    llama: StreamingModel, temperature: float, drafts: int, pass_tokens: int, micro_tokens: int
) -> None:
    sizes = {"pass_tokens": pass_tokens, "micro_tokens": micro_tokens}
    engine, plain = answer_all(llama, temperature, **sizes)
    run(engine, *plain)
    for seed in range(3):
        engine, requests = answer_all(llama, temperature, draft_tokens=drafts, **sizes)
        engine.drafter = ScriptedDrafter(mixture(seed, VOCABULARY, known(requests, plain)))
        run(engine, *requests)
        assert_same(requests, plain)
        assert 0 < engine.tokens_accepted < engine.tokens_drafted
        assert engine.tokens_read == sum(LENGTHS) + sum(ANSWERS) - len(ANSWERS)
        assert engine.tokens_generated == sum(ANSWERS)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_sliding_layers_verify_drafts_too(mixed: StreamingModel, temperature: float) -> None:
    engine, plain = answer_all(mixed, temperature)
    run(engine, *plain)
    engine, requests = answer_all(mixed, temperature, draft_tokens=5)
    engine.drafter = ScriptedDrafter(mixture(1, VOCABULARY, known(requests, plain)))
    run(engine, *requests)
    assert_same(requests, plain)
    assert engine.tokens_accepted > 0


def test_looking_up_what_repeats_saves_passes(llama: StreamingModel) -> None:
    """Random models soon repeat themselves: their answers are there to be copied."""
    plain_engine, plain = answer_all(llama, 0.0, pass_tokens=300)
    run(plain_engine, *plain)
    engine, requests = answer_all(llama, 0.0, pass_tokens=300, draft_tokens=8)
    run(engine, *requests)
    assert_same(requests, plain)
    assert engine.passes < plain_engine.passes
    assert engine.tokens_per_turn > 1
    assert plain_engine.tokens_per_turn == 1


@pytest.mark.parametrize("stop_at", range(0, 24, 3))
def test_a_stop_token_among_the_drafts_ends_the_answer_there(llama: StreamingModel, stop_at: int) -> None:
    def request(engine: Engine, stop: frozenset[int] = frozenset()) -> Request:
        sampling = Sampling(1.5, seed=3)
        return Request(engine.open(sinks=SINKS), random_tokens(40), max_new_tokens=30, sampling=sampling, stop=stop)

    engine = small_engine(llama)
    free = request(engine)
    run(engine, free)
    stop = frozenset({free.generated[stop_at]})
    plain = request(engine, stop)
    run(engine, plain)
    assert plain.finish_reason == "stop"
    engine = small_engine(llama, pass_tokens=40, draft_tokens=8)
    stopped = request(engine, stop)
    engine.drafter = ScriptedDrafter(truth({id(stopped.stream): free.generated}))
    run(engine, stopped)
    assert_same([stopped], [plain])
    assert engine.tokens_drafted == engine.tokens_accepted  # nothing from the stop token on was even tried
    assert engine.tokens_generated == len(plain.generated) + 1


@pytest.mark.parametrize("answer", range(1, 24))
@pytest.mark.parametrize("drafts", [1, 4, 8])
def test_the_truth_is_confirmed_in_the_least_number_of_passes(llama: StreamingModel, answer: int, drafts: int) -> None:
    engine = small_engine(llama, pass_tokens=40)
    plain = Request(engine.open(sinks=SINKS), random_tokens(33), max_new_tokens=answer)
    run(engine, plain)
    engine = small_engine(llama, pass_tokens=40, draft_tokens=drafts)
    request = Request(engine.open(sinks=SINKS), random_tokens(33), max_new_tokens=answer)
    engine.drafter = ScriptedDrafter(truth({id(request.stream): plain.generated}))
    run(engine, request)
    assert_same([request], [plain])
    decoding = math.ceil((answer - 1) / (drafts + 1))
    assert engine.passes == 1 + decoding
    assert engine.tokens_accepted == engine.tokens_drafted == answer - 1 - decoding
    assert engine.tokens_per_turn == pytest.approx(answer / (1 + decoding))


def test_drafts_beside_streams_that_read_take_only_the_room_that_is_left(llama: StreamingModel) -> None:
    engine = small_engine(llama, pass_tokens=12, draft_tokens=8)
    writer = Request(engine.open(sinks=SINKS), [1, 2], max_new_tokens=40)
    engine.submit(writer)
    engine.step()
    engine.drafter = ScriptedDrafter(lambda request, most: [0] * most)
    engine.submit(Request(engine.open(sinks=SINKS), random_tokens(22 + 6)))
    drafted = []
    for _ in range(4):
        before = engine.tokens_drafted
        engine.step()
        drafted.append(engine.tokens_drafted - before)
    assert drafted[:3] == [0, 0, 5]  # 1 + 11 tokens, 1 + 11, 1 + 6 and five more


# --- the stream behind rejected drafts ------------------------------------------------------------------------


def poison_ahead(engine: Engine, stream: Stream, value: float) -> None:
    """Overwrite what lies beyond the stream's end: drafts that were rejected."""
    for layer in engine.cache.layers:
        first = layer.sinks(stream.sinks)
        for position in range(stream.length, stream.reach):
            row = position if position < first else first + (position - first) % layer.capacity
            layer.keys[stream.slot, :, row] = value
            layer.values[stream.slot, :, row] = value


def after_rejection(
    model: StreamingModel, lengths: Sequence[int], chunk: int, *, drafted: bool, excursion: bool = False
) -> Tensor:
    """Logits [streams, tokens, vocabulary] of what is read, ``chunk`` tokens at a time, behind texts of these lengths,
    with holes, and the first two tokens of an answer (nothing behind an excursion). ``drafted``: the second in a pass
    in which all of 8 drafts were rejected."""
    count = len(lengths)
    sizes = {"streams": count + 1, "micro_tokens": 10, "excursion": 10, "pass_tokens": 4096}
    engine = small_engine(model, draft_tokens=DRAFTS if drafted else 0, **sizes)
    streams = [engine.open(sinks=SINKS) for _ in lengths]
    run(engine, *(Request(stream, random_tokens(length)) for stream, length in zip(streams, lengths, strict=True)))
    for stream in streams:
        if stream.length > SINKS + 8:
            engine.evict(stream, stream.length - 6, stream.length - 4)
    requests = [Request(stream, [3], max_new_tokens=10, excursion=excursion) for stream in streams]
    for request in requests:
        engine.submit(request)
    engine.step()  # the question; a token is pending
    wrong = {id(stream): (following(engine, stream) + 1) % VOCABULARY for stream in streams if drafted}
    engine.drafter = ScriptedDrafter(lambda request, most: [wrong[id(request.stream)]] * most)
    engine.step()
    if drafted:
        assert (engine.tokens_drafted, engine.tokens_accepted) == (count * DRAFTS, 0)
        assert all(stream.reach == stream.length + DRAFTS for stream in streams)
    for request in requests:
        if request.mark is not None:
            request.stream.rewind(request.mark)
        # What the next pass overwrites may be anything; what it does not must only be finite.
        poison_ahead(engine, request.stream, float("nan") if chunk == 10 else 1e4)
    more, logits = random_tokens(10, 1), []
    for stream in streams:  # one by one: a pass of all would be cut into micro-batches anywhere
        parts = [
            engine.forward([(stream, more[start : start + chunk])]) for start in range(0, min(10, 3 * chunk), chunk)
        ]
        logits.append(model.head(torch.cat(parts)))
    return torch.stack(logits).cpu()


def following(engine: Engine, stream: Stream) -> int:
    """What the model chooses behind the pending token."""
    [pending] = [request.pending for request in engine._requests if request.stream is stream]
    assert pending is not None
    fork = engine.fork(stream)
    choice = int(read(engine, fork, [pending])[-1].argmax())
    engine.close(fork)
    return choice


DRAFTS = 8
# The ring has 24 + 10 rows behind 4 sinks: the first tokens, and every phase of a later turn.
LENGTHS_OF_A_TURN = [*range(1, 8), *range(60, 60 + WINDOW + 10)]


@pytest.mark.parametrize("excursion", [False, True])
@pytest.mark.parametrize("chunk", [1, 10])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-4), ("float64", 1e-5)])
def test_rejecting_all_at_every_phase_of_the_ring_leaves_no_trace(
    load: Any, device: str, dtype: str, tolerance: float, chunk: int, excursion: bool
) -> None:
    if device == "cuda" and dtype == "float64":
        pytest.skip("its kernel computes in float32")
    model = load(3, device, dtype=dtype)
    rejected, plain = (
        after_rejection(model, LENGTHS_OF_A_TURN, chunk, drafted=drafted, excursion=excursion)
        for drafted in (True, False)
    )
    assert (rejected - plain).abs().max() < tolerance * (10 if device == "cuda" else 1)
    if excursion:
        assert torch.equal(rejected, plain)


@pytest.mark.parametrize("chunk", [1, 10])
def test_rejecting_all_in_sliding_layers_leaves_no_trace(mixed: StreamingModel, chunk: int) -> None:
    rejected, plain = (after_rejection(mixed, LENGTHS_OF_A_TURN, chunk, drafted=drafted) for drafted in (True, False))
    assert (rejected - plain).abs().max() < 2e-4


def test_excursions_as_long_as_the_headroom_are_forgotten(llama: StreamingModel) -> None:
    """Question, answer and drafts together never go further than planned for, and the stream never knows."""
    question, answer = 5, HEADROOM + 1 - 5

    def outcomes(drafts: int) -> tuple[list[int], Tensor]:
        engine = small_engine(llama, draft_tokens=drafts, micro_tokens=4)
        assert engine.cache.headroom == HEADROOM
        stream = engine.open(sinks=SINKS)
        read(engine, stream, random_tokens(77))
        request = Request(stream, random_tokens(question, 2), max_new_tokens=answer, excursion=True)
        if drafts:
            engine.drafter = ScriptedDrafter(lambda request, most: [0] * 50)
        run(engine, request)
        assert stream.reach <= 77 + HEADROOM
        return request.generated, read(engine, stream, random_tokens(70, 1))

    (drafted, after), (plain, untouched) = outcomes(8), outcomes(0)
    assert drafted == plain
    assert torch.equal(after, untouched)


def test_a_hand_made_excursion_bounds_the_drafts(llama: StreamingModel) -> None:
    """Without drafts there would be room for three tokens behind the question; drafts must not take it."""
    engine = small_engine(llama, draft_tokens=8, pass_tokens=40)
    stream = engine.open(sinks=SINKS)
    read(engine, stream, random_tokens(60))
    stream.mark()
    request = Request(stream, random_tokens(HEADROOM - 3, 1), max_new_tokens=50)
    engine.drafter = ScriptedDrafter(lambda request, most: [0] * most)
    engine.submit(request)
    for _ in range(4):
        engine.step()
    assert len(request.generated) == 4 + engine.tokens_accepted
    assert engine.tokens_drafted == 2 + 1


def test_a_fork_amid_drafts_goes_on_as_the_stream_does(llama: StreamingModel) -> None:
    engine, plain = answer_all(llama, 0.8)
    run(engine, *plain)
    engine, requests = answer_all(llama, 0.8, draft_tokens=4)
    engine.drafter = ScriptedDrafter(mixture(3, VOCABULARY, known(requests, plain)))
    request = requests[0]
    for other in requests[1:]:
        engine.close(other.stream)
    engine.submit(request)
    while len(request.generated) < 17:
        engine.step()
    fork = engine.fork(request.stream)
    copy = engine.restore(engine.snapshot(request.stream))
    run(engine)
    engine.drafter = NgramDrafter()
    for stream in (fork, copy):
        left = Request(stream, [plain[0].generated[stream.length - LENGTHS[0]]], max_new_tokens=4)
        run(engine, left)
        # greedy from here on, as a fresh stream with the same text would go on
        fresh = engine.open(sinks=SINKS)
        whole = [*request.tokens, *plain[0].generated][: stream.length - len(left.generated) + 1]
        again = Request(fresh, whole, max_new_tokens=4)
        run(engine, again)
        assert left.generated == again.generated
        engine.close(fresh)
    assert request.generated == plain[0].generated


# --- passes that break off -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "best"])
def test_a_pass_with_drafts_that_broke_off_can_be_run_again(
    llama: StreamingModel, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain = answer_all(llama, 0.0, pass_tokens=200)
    run(engine, *plain)
    engine, requests = answer_all(llama, 0.0, pass_tokens=200, draft_tokens=8)
    engine.drafter = ScriptedDrafter(mixture(2, VOCABULARY, known(requests, plain)))
    for request in requests:
        engine.submit(request)
    working = getattr(llama, where)

    def broken(*arguments: Any) -> Tensor:
        if where == "forward":
            working(*arguments)  # everything is written, and then it breaks
        raise ZeroDivisionError

    steps = 0
    while engine.busy:
        if steps % 3 == 1:
            monkeypatch.setattr(llama, where, broken)
            with pytest.raises(ZeroDivisionError):
                engine.step()
            monkeypatch.setattr(llama, where, working)
        engine.step()
        steps += 1
    assert_same(requests, plain)


# --- settings --------------------------------------------------------------------------------------------------


def test_drafts_are_on_where_layers_are_streamed(folders: Any) -> None:
    resident = AutoModel.from_pretrained(folders(3), device="cpu", dtype="float32")
    streamed = AutoModel.from_pretrained(folders(3), device="cpu", dtype="float32", resident_layers=1)
    assert small_engine(resident).draft_tokens == 0
    assert small_engine(streamed).draft_tokens == 8
    assert small_engine(resident, draft_tokens=3).draft_tokens == 3
    assert small_engine(streamed, draft_tokens=0).draft_tokens == 0
    assert small_engine(resident, draft_tokens=40).cache.headroom == 41
    with pytest.raises(ValueError, match="draft_tokens"):
        EngineConfig(draft_tokens=-1)


def test_generate_takes_draft_tokens(llama: StreamingModel) -> None:
    ids = torch.tensor([random_tokens(20)])
    plain = llama.generate(ids, max_new_tokens=60, draft_tokens=0)
    assert torch.equal(llama.generate(ids, max_new_tokens=60, draft_tokens=8), plain)


def test_closing_a_stream_tells_the_drafter(llama: StreamingModel) -> None:
    engine = small_engine(llama, draft_tokens=2)
    drafter = engine.drafter = ScriptedDrafter(lies(VOCABULARY, {}))
    stream = engine.open()
    engine.close(stream)
    assert drafter.forgotten == [stream]


def test_drafts_grow_when_all_are_kept_and_shrink_when_not() -> None:
    assert [adapted(limit, limit, limit, 8) for limit in (1, 2, 4, 8)] == [2, 4, 8, 8]
    assert [adapted(8, 8, kept, 8) for kept in (0, 3, 4, 7)] == [4, 4, 5, 8]
    assert adapted(1, 1, 0, 8) == 1
    assert adapted(4, 2, 2, 8) == 8


# --- looking up ------------------------------------------------------------------------------------------------


def brute_force(ids: list[int], most: int, longest: int, shortest: int) -> list[int]:
    for size in range(longest, shortest - 1, -1):
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == ids[-size:]:
                drafted = list(ids)
                for index in range(start + size, start + size + most):
                    drafted.append(drafted[index])
                return drafted[len(ids) :]
    return []


@pytest.mark.parametrize("seed", range(30))
def test_the_latest_of_the_longest_matches_is_continued(seed: int) -> None:
    chance = random.Random(seed)
    longest = chance.randint(1, 5)
    shortest = chance.randint(1, longest)
    drafter = NgramDrafter(longest, shortest)
    for _ in range(50):
        ids = chance.choices(range(chance.choice([1, 2, 3, 20])), k=chance.randint(1, 40))
        most = chance.randint(1, 9)
        found = drafter._continuation(np.array(ids, np.int32), most)
        assert found == brute_force(ids, most, longest, shortest), (ids, most)


@pytest.mark.parametrize(("longest", "shortest"), [(0, 0), (2, 3), (1, 0)])
def test_matches_of_no_length_are_refused(longest: int, shortest: int) -> None:
    with pytest.raises(ValueError, match="shortest <= longest"):
        NgramDrafter(longest, shortest)
