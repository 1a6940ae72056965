"""A small model drafts for a large one: it follows wherever the stream goes, and never changes what is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamllm_core import AutoModel, Engine, ModelDrafter, ModelError, Request, Sampling, StreamingModel
from streamllm_core.draft_model import WINDOW
from tests.streamllm_core.tiny_engines import SINKS, random_tokens, read, run, small_engine
from tests.streamllm_core.tiny_llama import write_llama

ANSWERS = (30, 12, 21)


def wide_engine(model: StreamingModel, draft_tokens: int = 0, window: int = WINDOW) -> Engine:
    """With a window that shows all of these texts, so that a model drafts well for itself."""
    return small_engine(model, window=window, draft_tokens=draft_tokens, pass_tokens=100)


def drafted_engine(model: StreamingModel, small: StreamingModel, streams: int = 4) -> tuple[Engine, ModelDrafter]:
    engine, drafter = wide_engine(model, 4), ModelDrafter(small, streams)
    drafter.attach(engine)
    return engine, drafter


def requests(engine: Engine, temperature: float = 0.0) -> list[Request]:
    return [
        Request(
            engine.open(sinks=SINKS),
            random_tokens(20 * number + 5, number),
            max_new_tokens=answer,
            sampling=Sampling(temperature, seed=number),
        )
        for number, answer in enumerate(ANSWERS)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_answers_are_those_without_drafts(load: object, device: str, layers: int, temperature: float) -> None:
    """Drafts of the model itself (three layers) are nearly all right, of another mostly wrong."""
    model, small = load(3, device), load(layers, device)  # type: ignore[operator]
    engine = wide_engine(model)
    plain = requests(engine, temperature)
    run(engine, *plain)
    engine, drafter = drafted_engine(model, small)
    drafted = requests(engine, temperature)
    run(engine, *drafted)
    assert [request.generated for request in drafted] == [request.generated for request in plain]
    assert [request.stream.length for request in drafted] == [request.stream.length for request in plain]
    assert engine.tokens_drafted > 0
    if layers == 3 and not temperature:
        assert engine.tokens_accepted == engine.tokens_drafted
        assert engine.passes == 1 + 6  # the longest answer: one token, then five a pass
    assert drafter.passes > 0


def test_all_drafts_of_a_pass_are_made_together(llama: StreamingModel) -> None:
    engine, drafter = drafted_engine(llama, llama)
    for request in requests(engine):
        engine.submit(request)
    engine.step()
    before = drafter.passes
    engine.step()
    assert drafter.passes == before + 4  # whatever the number of streams


def test_a_follower_reads_only_what_is_new(llama: StreamingModel) -> None:
    """Questions on excursions, more text, an answer: each of them a few tokens for it."""
    engine, drafter = drafted_engine(llama, llama)
    stream = engine.open(sinks=SINKS)
    read(engine, stream, random_tokens(300))
    small = drafter._engine

    def read_by_follower(request: Request) -> int:
        before = small.tokens_read
        run(engine, request)
        assert engine.tokens_accepted == engine.tokens_drafted
        return small.tokens_read - before

    first = read_by_follower(Request(stream, random_tokens(3, 1), max_new_tokens=11, excursion=True))
    assert first == 303 + 1 + 3 + 2 + 3  # text, pending token, three of four drafts; the fourth, pending, three of four
    again = read_by_follower(Request(stream, random_tokens(3, 2), max_new_tokens=11, excursion=True))
    assert again < 16
    more = read_by_follower(Request(stream, random_tokens(8, 3), max_new_tokens=6))
    assert more < 20


def test_forks_and_closed_streams(llama: StreamingModel) -> None:
    engine, drafter = drafted_engine(llama, llama)
    stream = engine.open(sinks=SINKS)
    run(engine, Request(stream, random_tokens(50), max_new_tokens=8))
    fork = engine.fork(stream)
    one, other = Request(stream, [1, 2], max_new_tokens=9), Request(fork, [2, 3], max_new_tokens=9)
    run(engine, one, other)
    assert engine.tokens_accepted == engine.tokens_drafted
    assert len(drafter._followers) == 2
    for each in (fork, stream):
        engine.close(each)
    assert not drafter._followers
    assert drafter._engine.free_streams == drafter._engine.streams


def test_with_fewer_followers_than_streams_the_others_are_not_drafted(llama: StreamingModel) -> None:
    engine = wide_engine(llama)
    plain = requests(engine)
    run(engine, *plain)
    engine, drafter = drafted_engine(llama, llama, streams=1)
    drafted = requests(engine)
    run(engine, *drafted)
    assert [request.generated for request in drafted] == [request.generated for request in plain]
    assert len(drafter._followers) == 1


def test_a_pass_of_the_small_model_that_broke_off(
    load: object, llama: StreamingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = load(1, llama.device.type)  # type: ignore[operator]
    engine = wide_engine(llama)
    plain = requests(engine)
    run(engine, *plain)
    engine, _ = drafted_engine(llama, small)
    drafted = requests(engine)
    for request in drafted:
        engine.submit(request)
    engine.step()
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(small, "best", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    run(engine)
    assert [request.generated for request in drafted] == [request.generated for request in plain]


def test_a_text_that_has_moved_on_by_more_than_the_window_is_begun_anew(llama: StreamingModel) -> None:
    engine, drafter = wide_engine(llama, 4, window=4 * WINDOW), ModelDrafter(llama, 1)
    drafter.attach(engine)
    stream = engine.open(sinks=SINKS)
    run(engine, Request(stream, random_tokens(40), max_new_tokens=6))
    run(engine, Request(stream, random_tokens(600, 1)))
    before = drafter._engine.tokens_read
    run(engine, Request(stream, [4], max_new_tokens=2))
    assert engine.tokens_drafted == 4  # none for the second answer: its only draft would have to be its last token
    run(engine, Request(stream, [4], max_new_tokens=3))
    assert drafter._engine.tokens_read - before == WINDOW


def test_another_vocabulary_is_refused(llama: StreamingModel, tmp_path: Path) -> None:
    small = AutoModel.from_pretrained(write_llama(tmp_path, vocabulary=50), device=llama.device, dtype="float32")
    with pytest.raises(ModelError, match="tokenizer"):  # the sizes differ, and there is no tokenizer to compare
        ModelDrafter(small, 2).attach(small_engine(llama))


def test_a_draft_model_that_is_streamed_itself_is_refused(folders: object, device: str) -> None:
    small = AutoModel.from_pretrained(folders(3), device=device, dtype="float32", resident_layers=1)  # type: ignore[operator]
    with pytest.raises(ModelError, match="must stay on the device, but 2 layers"):
        ModelDrafter(small)


def test_its_size_is_known(llama: StreamingModel) -> None:
    one, many = ModelDrafter(llama, 1), ModelDrafter(llama, 9)
    per_token = 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head size, float32
    assert many.nbytes - one.nbytes == 8 * per_token * (4 + 512 + 256)
    assert one.nbytes > llama.plan.placement.total > 0
