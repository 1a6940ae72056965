"""The runner over the real engine with a tiny model: scheduling changes nothing but the time that it takes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.documents import Document
from pipeline.inputs import InputFile
from pipeline.prompts import Prompter
from pipeline.rows import Place, Row
from pipeline.runner import Runner
from pipeline.taskrun import Asking, Finished
from pipeline.tasks.commands import Ask, AskLater, Close, Gather, Pin, Read, Result, Steps
from pipeline.tasks.summarize import SummarizeOptions, summarize
from streamllm_core import AutoModel, EngineConfig, StreamingModel

FILE = InputFile(0, "in.jsonl", "jsonl", None, 0, "")
OPTIONS = SummarizeOptions("notes", "Sum up.", "Note.", "top", segment_tokens=32, room=64, group=2)
WINDOW, ANSWER = 128, 4


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> StreamingModel:
    return AutoModel.from_pretrained(str(tiny_model), device="cpu", dtype="float32")


def text_of(row: int, sentences: int) -> str:
    return " ".join(f"Ship {index} of row {row} left the harbour with salt." for index in range(sentences))


class World:
    """An engine, a runner on it, and documents."""

    def __init__(self, model: StreamingModel, streams: int, pass_tokens: int = 48) -> None:
        self.prompter = Prompter(model.tokenizer)
        config = EngineConfig(window=WINDOW, sinks=160, excursion=64, streams=streams, pass_tokens=pass_tokens)
        self.engine = model.engine(config)
        asking = Asking(ANSWER, OPTIONS.room)
        self.runner = Runner(self.engine, self.prompter, self.prompter.stop, asking, side_stream=streams > 1)

    def document(self, row: int, sentences: int) -> Document:
        return Document(
            Row(FILE, Place(row), text=text_of(row, sentences)), lambda text: list(self.prompter.data(text).ids)
        )

    def run(self, documents: list[Document], task: Callable[[Document], Steps[Result]]) -> dict[int, Finished]:
        waiting, finished = list(documents), {}
        for _ in range(5000):
            while waiting and self.runner.has_room:
                started = waiting.pop(0)
                self.runner.start(started, task(started))
            if not waiting and not self.runner.busy:
                break
            for each in self.runner.step():
                finished[each.document.row] = each
        assert self.engine.free_streams == self.engine.streams
        assert not self.engine.busy
        return finished


def notes(document: Document) -> Steps[Result]:
    return summarize(document, OPTIONS)


def test_results_do_not_depend_on_how_many_run_together(model: StreamingModel) -> None:
    sizes = [1, 9, 4, 14, 2, 7]
    many, few = World(model, streams=9, pass_tokens=96), World(model, streams=2, pass_tokens=17)
    wide = many.run([many.document(row, size) for row, size in enumerate(sizes)], notes)
    narrow = few.run([few.document(row, size) for row, size in enumerate(sizes)], notes)
    assert sorted(wide) == list(range(len(sizes)))
    assert all(each.error is None for each in wide.values())
    assert {row: (each.result, each.usage) for row, each in wide.items()} == {
        row: (each.result, each.usage) for row, each in narrow.items()
    }
    assert many.engine.passes < few.engine.passes


def test_usage_counts_what_was_read_and_written(model: StreamingModel) -> None:
    world = World(model, streams=2)
    document = world.document(0, 2)
    finished = world.run([document], lambda each: summarize(each, replace(OPTIONS, segment_tokens=60)))[0]
    question = len(world.prompter.question("Sum up.", "Sum up."))
    assert finished.usage.segments == 1
    assert finished.usage.input_tokens == len(world.prompter.data(text_of(0, 2)).ids) + question
    assert 0 <= finished.usage.output_tokens <= ANSWER


def test_highlights_get_a_vector_for_each_sentence(model: StreamingModel) -> None:
    world = World(model, streams=1)
    shapes: list[Any] = []

    def task(document: Document) -> Steps[Result]:
        yield Pin("Sum up.")
        for segment in document.segments(32):
            vectors = yield Read(segment, vectors=True)
            shapes.append((vectors.shape, len(segment.sentences), vectors.dtype.name))
        yield Close()
        return Result("done")

    world.run([world.document(0, 9)], task)
    assert len(shapes) > 1
    assert all(shape == (count, model.config.hidden_size) and kind == "float32" for shape, count, kind in shapes)


def test_one_document_s_failure_stays_its_own(model: StreamingModel) -> None:
    world = World(model, streams=4)

    def task(document: Document) -> Steps[Result]:
        if document.row == 1:
            yield Pin("Sum up.")
            segment = next(document.segments(32))
            yield Read(segment)
            yield AskLater("Note.")
            raise ZeroDivisionError("in the middle, with a question out")
        return (yield from notes(document))

    finished = world.run([world.document(row, 8) for row in range(4)], task)
    alone = World(model, streams=4).run([world.document(2, 8)], notes)
    assert isinstance(finished[1].error, ZeroDivisionError)
    assert [row for row, each in finished.items() if each.error] == [1]
    assert finished[2].result == alone[2].result


def test_a_question_that_is_too_long_is_its_document_s_error(model: StreamingModel) -> None:
    world = World(model, streams=2)

    def task(document: Document) -> Steps[Result]:
        yield Pin("Sum up.")
        yield Read(next(document.segments(32)))
        yield Ask("Why? " * 400)
        yield Close()
        return Result("never")

    finished = world.run([world.document(0, 3)], task)
    assert type(finished[0].error).__name__ == "WindowError"


def test_trouble_of_the_machine_is_no_document_s_error(model: StreamingModel) -> None:
    world = World(model, streams=2)

    def task(document: Document) -> Steps[Result]:
        yield Pin("Sum up.")
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        world.run([world.document(0, 3)], task)


def test_asking_now_and_asking_later_give_the_same_answer(model: StreamingModel) -> None:
    def asks(later: bool) -> Callable[[Document], Steps[Result]]:
        def task(document: Document) -> Steps[Result]:
            yield Pin("Sum up.")
            answers = []
            for segment in document.segments(32):
                yield Read(segment)
                if later:
                    ticket = yield AskLater("Note.")
                    answers += yield Gather((ticket,))
                else:
                    answers.append((yield Ask("Note.")))
            yield Close()
            return Result(" | ".join(answers))

        return task

    now = World(model, streams=2)
    now_result = now.run([now.document(0, 9)], asks(later=False))[0].result
    later = World(model, streams=2)
    later_result = later.run([later.document(0, 9)], asks(later=True))[0].result
    assert now_result == later_result
    degraded = World(model, streams=1)  # no slot for a fork: the question goes to the stream itself
    assert degraded.run([degraded.document(0, 9)], asks(later=True))[0].result == now_result


def test_a_task_may_open_another_stream_after_closing_its_own(model: StreamingModel) -> None:
    def twice(document: Document) -> Steps[Result]:
        answers = []
        for _ in range(2):
            yield Pin("Sum up.")
            yield Read(next(document.segments(32)))
            answers.append((yield Ask("Note.")))
            yield Close()
        return Result(" ".join(answers))

    world = World(model, streams=2)
    finished = world.run([world.document(row, 3) for row in range(4)], twice)
    assert sorted(finished) == [0, 1, 2, 3]
    assert all(each.error is None for each in finished.values())


def test_a_document_is_started_only_when_a_stream_is_free(model: StreamingModel) -> None:
    world = World(model, streams=3)
    started: list[int] = []

    def task(document: Document) -> Steps[Result]:
        started.append(document.row)
        return (yield from notes(document))

    documents: Iterator[Document] = (world.document(row, 8) for row in range(6))
    while world.runner.has_room:
        document = next(documents)
        world.runner.start(document, task(document))
    assert started == [0, 1]  # the third stream is kept for questions on the side
    while world.runner.busy:
        world.runner.step()
