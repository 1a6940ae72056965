"""Streams and requests: ragged batches, pins, forks, reused slots, scores, micro-batches, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from streamllm_core import (
    Engine,
    EngineConfig,
    NoFreeStream,
    Request,
    Stream,
    StreamingModel,
    StreamLLMError,
    WindowError,
)
from tests.streamllm_core.tiny_engines import HEADROOM, SINKS, fill, random_tokens, read, run, small_engine
from tests.streamllm_core.tiny_models import load_stock

LENGTHS = (1, 3, 9, 30, 57, 110, 220)
ANSWERS = (11, 30, 1, 20, 7, 3, 12)


def documents(engine: Engine) -> list[Request]:
    return [
        Request(engine.open(sinks=SINKS), random_tokens(length, seed), max_new_tokens=answer)
        for seed, (length, answer) in enumerate(zip(LENGTHS, ANSWERS, strict=True))
    ]


@pytest.fixture(scope="module")
def alone(load: object) -> list[list[int]]:
    """The greedy answer to each document, read by itself on the CPU."""
    answers = []
    for number in range(len(LENGTHS)):
        engine = small_engine(load(3), streams=7)  # type: ignore[operator]
        request = documents(engine)[number]
        run(engine, request)
        answers.append(request.generated)
    return answers


# --- ragged batches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pass_tokens", "micro_tokens"), [(10, 3), (40, 16), (600, 7)])
def test_a_ragged_batch_gives_each_document_what_it_gives_alone(
    llama: StreamingModel, alone: list[list[int]], pass_tokens: int, micro_tokens: int
) -> None:
    engine = small_engine(llama, streams=7, pass_tokens=pass_tokens, micro_tokens=micro_tokens)
    requests = documents(engine)
    finished = run(engine, *requests)
    assert [request.generated for request in requests] == alone
    assert [len(answer) for answer in alone] == list(ANSWERS)
    assert len(finished) == len(requests)
    assert engine.tokens_generated == sum(ANSWERS)
    assert engine.tokens_read == sum(LENGTHS) + sum(ANSWERS) - len(ANSWERS)  # no last token is ever read


def test_streams_that_decode_together_may_pin_prefixes_of_any_length(llama: StreamingModel) -> None:
    """Their rings lie differently in neighbouring slots, which are read as one block."""

    def requests(engine: Engine) -> list[Request]:
        return [
            Request(engine.open(sinks=sinks), random_tokens(60 + sinks, sinks), max_new_tokens=50)
            for sinks in (9, 1, 4, 0)
        ]

    engine = small_engine(llama, sinks=9)
    together = requests(engine)
    run(engine, *together)
    for number, request in enumerate(together):
        engine = small_engine(llama, sinks=9)
        alone = requests(engine)[number]
        run(engine, alone)
        assert request.generated == alone.generated


def test_documents_that_take_each_others_places_give_what_they_give_alone(
    llama: StreamingModel, alone: list[list[int]]
) -> None:
    """Two slots for seven documents: one ends, the next begins in its place while the other is half read."""
    engine = small_engine(llama, streams=2, pass_tokens=10, micro_tokens=4)
    waiting = list(enumerate(zip(LENGTHS, ANSWERS, strict=True)))
    order: dict[int, int] = {}
    answers: dict[int, list[int]] = {}
    while waiting or engine.busy:
        while waiting and engine.free_streams:
            number, (length, answer) = waiting.pop()
            request = Request(engine.open(sinks=SINKS), random_tokens(length, number), max_new_tokens=answer)
            engine.submit(request)
            order[id(request)] = number
        for request in engine.step():
            engine.close(request.stream)
            answers[order[id(request)]] = request.generated
    assert [answers[number] for number in range(len(alone))] == alone


def test_decoding_does_not_wait_for_a_long_document(llama: StreamingModel) -> None:
    engine = small_engine(llama, pass_tokens=10)
    short = Request(engine.open(sinks=SINKS), random_tokens(3), max_new_tokens=10)
    long = Request(engine.open(sinks=SINKS), random_tokens(400), max_new_tokens=1)
    engine.submit(long)
    engine.submit(short)
    engine.step()
    engine.step()
    assert short.pending is not None  # reading is shared …
    assert long.fed < len(long.tokens)
    engine.submit(Request(engine.open(sinks=SINKS), random_tokens(400)))
    before = len(short.generated)
    engine.step()
    assert len(short.generated) == before + 1  # … but who decodes, decodes in every pass


# --- pins ------------------------------------------------------------------------------------------------------


def test_a_pin_is_computed_once_and_shared(llama: StreamingModel) -> None:
    engine = small_engine(llama, sinks=20)
    pin, text = random_tokens(17, 1), random_tokens(60, 2)
    first = engine.open(pin)
    assert engine.passes == 2  # 17 tokens, 12 a pass
    outcomes = [read(engine, first, text)]
    passes = engine.passes
    others = [engine.open(pin) for _ in range(2)]
    assert engine.passes == passes
    assert [(stream.length, stream.sinks) for stream in others] == [(17, 17)] * 2
    engine.close(first)  # the pin outlives the stream that computed it
    outcomes += [read(engine, stream, text) for stream in others]
    engine.close(others[0])
    outcomes.append(read(engine, engine.open(pin), text))
    for outcome in outcomes[1:]:
        assert torch.allclose(outcome, outcomes[0], atol=1e-5)

    plain = small_engine(llama, sinks=20)
    wanted = read(plain, plain.open(sinks=17), pin + text)[17:]
    assert torch.allclose(outcomes[0], wanted, atol=1e-4)


def test_a_question_can_follow_a_pin_at_once(llama: StreamingModel) -> None:
    engine = small_engine(llama)
    first, second = (Request(engine.open((5, 6, 7)), [], max_new_tokens=4) for _ in range(2))
    run(engine, first, second)
    assert len(first.generated) == 4
    assert first.generated == second.generated


def test_different_pins_are_kept_apart(llama: StreamingModel) -> None:
    engine = small_engine(llama)
    text = random_tokens(40)
    one, other = engine.open((1, 2, 3)), engine.open((1, 2, 4))
    assert not torch.allclose(read(engine, one, text), read(engine, other, text), atol=1e-2)
    again = engine.open((1, 2, 3))
    assert again.length == 3


def test_a_pin_longer_than_planned_is_refused(llama: StreamingModel) -> None:
    engine = small_engine(llama)
    with pytest.raises(WindowError, match=r"5 tokens.*only 4"):
        engine.open(range(5))
    assert engine.free_streams == 4
    assert engine.passes == 0


# --- forks and slots -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 20, 39, 44, 150])
def test_a_fork_goes_its_own_way_and_leaves_the_original_alone(llama: StreamingModel, length: int) -> None:
    text, more, other = random_tokens(length), random_tokens(50, 1), random_tokens(70, 2)

    def outcome(forked: bool) -> tuple[Tensor, Tensor | None]:
        engine = small_engine(llama)
        stream = engine.open(sinks=SINKS)
        read(engine, stream, text)
        if not forked:
            return read(engine, stream, more), None
        fork = engine.fork(stream)
        read(engine, fork, other)
        late = engine.fork(stream)
        mine = read(engine, stream, more)
        return mine, read(engine, late, more)

    (plain, _), (original, late) = outcome(False), outcome(True)
    assert torch.equal(original, plain)
    assert late is not None
    assert torch.allclose(late, plain, atol=1e-5)


def test_a_fork_of_a_running_request_can_answer_beside_it(llama: StreamingModel) -> None:
    engine = small_engine(llama)
    stream = engine.open(sinks=SINKS)
    run(engine, Request(stream, random_tokens(50)))
    alone = Request(engine.fork(stream), random_tokens(5, 1), max_new_tokens=10)
    run(engine, alone)
    beside = Request(engine.fork(stream), random_tokens(5, 1), max_new_tokens=10)
    run(engine, Request(stream, random_tokens(90, 2)), beside)
    assert beside.generated == alone.generated


def test_nan_in_freed_slots_harms_nobody(llama: StreamingModel, alone: list[list[int]]) -> None:
    """A freed slot may hold anything: between two decoding streams, or when it is given out again."""
    engine = small_engine(llama, streams=7, pass_tokens=40)
    fill(engine, range(7), float("nan"))
    requests = documents(engine)
    for number in (0, 2, 5):
        engine.close(requests[number].stream)
    fill(engine, (0, 2, 5), float("nan"))
    run(engine, *(requests[number] for number in (1, 3, 4, 6)))
    assert [requests[number].generated for number in (1, 3, 4, 6)] == [alone[number] for number in (1, 3, 4, 6)]

    for number in (1, 4):
        engine.close(requests[number].stream)
    fill(engine, (0, 1, 2, 4, 5), float("nan"))
    again = [Request(engine.open(sinks=SINKS), random_tokens(LENGTHS[n], n), max_new_tokens=ANSWERS[n]) for n in (0, 6)]
    run(engine, *again)
    assert [request.generated for request in again] == [alone[0], alone[6]]


@pytest.mark.parametrize("way", ["fork", "restore", "pin"])
def test_a_poisoned_slot_takes_a_copied_stream(llama: StreamingModel, way: str) -> None:
    engine = small_engine(llama)
    pin, more = random_tokens(4), random_tokens(60, 2)
    stream = engine.open(pin)
    fill(engine, (1, 2, 3), float("nan"))
    if way == "fork":
        copy = engine.fork(stream)
    elif way == "restore":
        copy = engine.restore(engine.snapshot(stream))
    else:
        copy = engine.open(pin)
    assert copy.slot == 1
    assert torch.allclose(read(engine, copy, more), read(engine, stream, more), atol=1e-5)


def test_streams_run_out_and_come_back(llama: StreamingModel) -> None:
    engine = small_engine(llama, streams=2)
    first, _ = engine.open((1, 2)), engine.open()
    for use in (engine.open, lambda: engine.open((1, 2)), lambda: engine.open((7,)), lambda: engine.fork(first)):
        with pytest.raises(NoFreeStream):
            use()
    assert engine.free_streams == 0
    engine.close(first)
    assert engine.free_streams == 1
    engine.open((1, 2))


def test_a_stream_keeps_one_row_of_a_pass_alive_not_all_of_them(llama: StreamingModel) -> None:
    engine = small_engine(llama, pass_tokens=64)
    stream = engine.open(sinks=SINKS)
    read(engine, stream, random_tokens(64))
    assert stream.last_hidden is not None
    assert stream.last_hidden.untyped_storage().nbytes() == 32 * 4


# --- scores and spans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pass_tokens", [5, 12, 200])
def test_scores_are_log_softmax_of_the_logits(llama: StreamingModel, pass_tokens: int) -> None:
    texts = [random_tokens(length, seed) for seed, length in enumerate((40, 1, 23, 64))]
    engine = small_engine(llama, pass_tokens=pass_tokens)
    requests = [Request(engine.open(sinks=SINKS), text, score=True) for text in texts]
    run(engine, *requests)
    for request, text in zip(requests, texts, strict=True):
        logits = llama.logits(torch.tensor([text]), sinks=SINKS, window=24)[0]
        wanted = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(text)[1:, None])[:, 0]
        assert torch.allclose(torch.tensor(request.logprobs), wanted, atol=1e-4)


def test_a_question_is_scored_from_its_first_token_on(llama: StreamingModel) -> None:
    """log P(question | passage): the first token counts, too, and answers and excursions change nothing."""
    passage, question = random_tokens(45), random_tokens(9, 1)
    logits = llama.logits(torch.tensor([passage + question]), sinks=SINKS, window=24)[0]
    wanted = logits.log_softmax(-1)[44:53].gather(1, torch.tensor(question)[:, None])[:, 0]
    engine = small_engine(llama, pass_tokens=7)
    stream = engine.open(sinks=SINKS)
    run(engine, Request(stream, passage))
    for answer in (0, 1, 6):
        request = Request(stream, question, max_new_tokens=answer, score=True, excursion=True)
        run(engine, request)
        assert len(request.generated) == answer
        assert len(request.logprobs) == len(question)
        assert torch.allclose(torch.tensor(request.logprobs), wanted, atol=1e-4)


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("pass_tokens", [7, 200])
def test_span_states_are_the_mean_hidden_states_at_two_thirds_of_the_depth(
    load: object, folders: object, device: str, layers: int, pass_tokens: int
) -> None:
    model = load(layers, device)  # type: ignore[operator]
    text = random_tokens(50)
    spans = [(0, 5), (5, 23), (23, 24), (10, 40), (7, 7), (49, 50)]
    engine = small_engine(model, window=100, pass_tokens=pass_tokens, micro_tokens=5)
    request = Request(engine.open(sinks=SINKS), text, spans=spans, max_new_tokens=4)
    other = Request(engine.open(sinks=SINKS), text[::-1], spans=[(0, 50)])
    run(engine, other, request)

    stock = load_stock(folders(layers))  # type: ignore[operator]
    states: dict[str, Tensor] = {}
    depth = max(1, round(layers * 2 / 3))  # transformers' last hidden state is normed, so it is taken with a hook
    stock.model.layers[depth - 1].register_forward_hook(lambda _, __, output: states.update(found=output))
    with torch.no_grad():
        output = stock(torch.tensor([text]), output_hidden_states=True)
    found = states["found"][0] if states["found"].ndim == 3 else states["found"]
    if depth < layers:
        assert torch.equal(found, output.hidden_states[depth][0])
    assert request.span_states is not None
    assert request.span_states.dtype == torch.float32
    wanted = torch.stack([found[start:stop].mean(0) for start, stop in spans]).nan_to_num(0)  # of no token: zeros
    assert torch.allclose(request.span_states, wanted, atol=1e-4)


# --- micro-batches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_tokens", [1, 5, 50])
def test_the_size_of_micro_batches_changes_nothing(llama: StreamingModel, micro_tokens: int) -> None:
    """Chunks far longer than a micro-batch and than the headroom, several streams in a pass, pins in its middle."""
    texts = [random_tokens(length, seed) for seed, length in enumerate((110, 3, 57))]

    def outcome(micro: int) -> Tensor:
        engine = small_engine(llama, pass_tokens=512, micro_tokens=micro, excursion=0)
        streams = [engine.open(sinks=sinks) for sinks in (4, 4, 0)]
        first = engine.forward([(stream, text[:2]) for stream, text in zip(streams, texts, strict=True)])
        second = engine.forward([(stream, text[2:]) for stream, text in zip(streams, texts, strict=True)])
        third = engine.forward([(stream, [1]) for stream in streams])
        assert engine.passes == 3
        return llama.head(torch.cat([first, second, third])).cpu()

    whole = outcome(256)
    tolerance = 1e-5 if llama.device.type == "cpu" else 1e-3
    assert (outcome(micro_tokens) - whole).abs().max() < tolerance * whole.abs().max()


# --- after an exception ----------------------------------------------------------------------------------------


def break_off(model: StreamingModel, tokens: int) -> tuple[Engine, Stream]:
    """A stream of 90 tokens, ``tokens`` more asked for, and an exception in the last layer of the first pass."""
    engine = small_engine(model, pass_tokens=64)
    stream = engine.open(sinks=SINKS)
    read(engine, stream, random_tokens(90))
    engine.submit(Request(stream, random_tokens(tokens, 1), max_new_tokens=3))
    with broken_layer(model, 2), pytest.raises(ZeroDivisionError):
        engine.step()
    return engine, stream


@pytest.mark.parametrize("tokens", [1, 8, HEADROOM])
def test_a_pass_that_broke_off_can_be_run_again(llama: StreamingModel, tokens: int) -> None:
    """The first layers have written their keys already, but into the headroom."""
    engine, stream = break_off(llama, tokens)
    while engine.busy:
        engine.step()
    plain = small_engine(llama, pass_tokens=64)
    other = plain.open(sinks=SINKS)
    read(plain, other, random_tokens(90))
    run(plain, Request(other, random_tokens(tokens, 1), max_new_tokens=3))
    assert stream.last_hidden is not None
    assert other.last_hidden is not None
    assert torch.equal(stream.last_hidden, other.last_hidden)


@pytest.mark.parametrize("tokens", [HEADROOM + 1, 60])
def test_a_longer_chunk_that_broke_off_is_not_run_again_with_half_a_window(llama: StreamingModel, tokens: int) -> None:
    engine, stream = break_off(llama, tokens)
    for use in (engine.step, lambda: engine.snapshot(stream), lambda: engine.fork(stream)):
        with pytest.raises(StreamLLMError, match="lost"):
            use()
    engine.close(stream)
    assert not engine.busy
    again = engine.open(sinks=SINKS)
    assert again.slot == 0
    run(engine, Request(again, random_tokens(90)))


class broken_layer:  # noqa: N801 - a context manager
    """The MLP of a layer raises once it is reached."""

    def __init__(self, model: StreamingModel, layer: int) -> None:
        self._mlp = model._skeleton.layers[layer].mlp

    def __enter__(self) -> None:
        self._hook = self._mlp.register_forward_pre_hook(lambda *_: 1 / 0)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


# --- what is refused -------------------------------------------------------------------------------------------


def test_one_request_a_stream_at_a_time(llama: StreamingModel) -> None:
    engine = small_engine(llama)
    stream = engine.open(sinks=SINKS)
    engine.submit(Request(stream, [1, 2, 3], max_new_tokens=2))
    with pytest.raises(ValueError, match="not finished"):
        engine.submit(Request(stream, [4]))
    while engine.busy:
        engine.step()
    run(engine, Request(stream, [4]))


@pytest.mark.parametrize("spans", [[(0, 4)], [(-1, 2)], [(3, 1)], [(0, 1), (4, 4)]])
def test_spans_must_lie_within_the_tokens(llama: StreamingModel, spans: list[tuple[int, int]]) -> None:
    """A span beyond them would silently take in what is generated."""
    stream = small_engine(llama).open()
    with pytest.raises(ValueError, match="spans must lie within the 3 tokens"):
        Request(stream, [1, 2, 3], spans=spans, max_new_tokens=3)


def test_a_negative_number_of_tokens_is_refused(llama: StreamingModel) -> None:
    """Counting up, an answer would never reach it."""
    with pytest.raises(ValueError, match="max_new_tokens must be at least 0"):
        Request(small_engine(llama).open(), [1, 2, 3], max_new_tokens=-1)


def test_there_must_be_something_to_do(llama: StreamingModel) -> None:
    engine = small_engine(llama)
    stream = engine.open(sinks=SINKS)
    with pytest.raises(ValueError, match="empty stream"):
        engine.submit(Request(stream, [], max_new_tokens=3))
    run(engine, Request(stream, [1]))
    with pytest.raises(ValueError, match="tokens to read or to generate"):
        engine.submit(Request(stream, []))
    assert not engine.busy
    assert engine.step() == []


def test_a_closed_stream_takes_no_request(llama: StreamingModel) -> None:
    engine = small_engine(llama)
    stream = engine.open(sinks=SINKS)
    engine.close(stream)
    with pytest.raises(ValueError, match="closed"):
        engine.submit(Request(stream, [1, 2]))
    assert not engine.busy


def test_closing_a_stream_drops_its_request(llama: StreamingModel) -> None:
    engine = small_engine(llama)
    kept = Request(engine.open(sinks=SINKS), random_tokens(30), max_new_tokens=3)
    dropped = Request(engine.open(sinks=SINKS), random_tokens(30), max_new_tokens=3)
    engine.submit(dropped)
    engine.submit(kept)
    engine.step()
    engine.close(dropped.stream)
    finished = []
    while engine.busy:
        finished += engine.step()
    assert finished == [kept]
    assert dropped.finish_reason is None


def test_a_stop_token_ends_an_answer_and_is_not_part_of_it(llama: StreamingModel) -> None:
    text = random_tokens(20)
    engine = small_engine(llama)
    free = Request(engine.open(sinks=SINKS), text, max_new_tokens=12)
    run(engine, free)
    stop = free.generated[5]
    first = free.generated.index(stop)
    stopped = Request(engine.open(sinks=SINKS), text, max_new_tokens=12, stop=frozenset({stop, 1000}))
    run(engine, stopped)
    assert stopped.generated == free.generated[:first]
    assert (stopped.finish_reason, stopped.stopped_by) == ("stop", stop)
    assert (free.finish_reason, free.stopped_by) == ("length", None)
    assert stopped.stream.length == 20 + first


@pytest.mark.parametrize(
    "sizes",
    [{"window": 0}, {"sinks": -1}, {"excursion": -1}, {"streams": 0}, {"pass_tokens": 0}, {"micro_tokens": 0}],
)
def test_senseless_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        EngineConfig(**sizes)


def test_a_window_beyond_the_trained_context_is_refused_with_the_numbers(llama: StreamingModel) -> None:
    small_engine(llama, window=4096 - 4 - 1)
    with pytest.raises(WindowError, match=r"4 \+ 4092 \+ 1 = 4097.*trained for 4096.*at most 4091"):
        small_engine(llama, window=4092)
