"""Drives the tasks of many documents at once over one engine, so that every pass over the weights serves them all."""

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from pipeline.documents import Document
from pipeline.prompts import Prompter
from pipeline.taskrun import Asking, Finished, TaskRun
from pipeline.tasks.commands import (
    Ask,
    AskApart,
    AskLater,
    Close,
    Command,
    Gather,
    Pin,
    Read,
    Result,
    Steps,
    Ticket,
)
from streamllm_core import Engine, Request, Sampling, Stream, WindowError

_WAIT: Final = object()  # the command's result comes later


class Runner:
    """Start documents while there is room, and step until they are finished.

    With `side_stream` a stream is kept for questions on the side (forks, fresh streams). Each of those needs one
    stream and ends by itself, and a task holds no more than its own while it waits for them: so no task ever waits
    for another.
    """

    def __init__(
        self, engine: Engine, prompter: Prompter, stop: frozenset[int], asking: Asking, *, side_stream: bool
    ) -> None:
        if side_stream and engine.streams < 2:
            raise ValueError("questions on the side need a second stream")
        self._engine = engine
        self._prompter = prompter
        self._stop = stop
        self._asking = asking
        self._spare = int(side_stream)
        self._runs: set[TaskRun] = set()
        self._running: dict[Request, Callable[[Request], None]] = {}
        self._apart: deque[tuple[TaskRun, AskApart, Ticket]] = deque()  # waiting for a stream
        self._pinning: deque[TaskRun] = deque()  # waiting for a stream, and holding none
        self._finished: list[Finished] = []

    @property
    def has_room(self) -> bool:
        """Whether another document can be started; what waits for a stream comes first."""
        return not self._apart and not self._pinning and self._engine.free_streams > self._spare

    @property
    def busy(self) -> bool:
        return bool(self._runs or self._finished)

    @property
    def active(self) -> int:
        """Documents in flight."""
        return len(self._runs)

    def start(self, document: Document, steps: Steps[Result]) -> None:
        """Run a document's task up to its first wait. Call it while there is room."""
        run = TaskRun(document, steps)
        self._runs.add(run)
        self._advance(run, None)

    def step(self) -> list[Finished]:
        """One pass over the weights; the documents that it finished."""
        self._ask_apart()
        while self._pinning and self._engine.free_streams > self._spare:
            run = self._pinning.popleft()
            self._advance(run, self._pin(run))
        if self._engine.busy:
            for request in self._engine.step():
                answered = self._running.pop(request, None)
                if answered is not None:  # not of a run that failed in this very pass
                    answered(request)
        finished, self._finished = self._finished, []
        return finished

    def _advance(self, run: TaskRun, value: object) -> None:
        """Send `value` to the task and carry out what it asks for, until it has to wait or ends."""
        while value is not _WAIT:
            try:
                command = run.steps.send(value)
            except StopIteration as end:
                self._end(run, end.value, None)
                return
            except (OSError, MemoryError):
                raise  # the machine's trouble, not this document's
            except Exception as error:  # noqa: BLE001 - the boundary: whatever goes wrong in one document stays there
                self._end(run, None, error)
                return
            try:
                value = self._perform(run, command)
            except WindowError as error:
                self._end(run, None, error)
                return

    def _perform(self, run: TaskRun, command: Command) -> object:
        match command:
            case Pin(instruction):
                if run.stream is not None:
                    raise RuntimeError("a task holds one stream at a time")
                run.instruction = instruction
                return self._pin(run)
            case Read():
                return self._read(run, command)
            case Ask(question):
                ticket = self._ticket(run)
                self._excursion(run, question, ticket, lambda text: self._advance(run, text))
                return _WAIT
            case AskLater(question):
                return self._ask_later(run, question)
            case AskApart():
                ticket = self._ticket(run)
                self._apart.append((run, command, ticket))
                return ticket
            case Gather(tickets):
                run.gathering = tickets
                return self._gathered(run)
            case Close():
                self._engine.close(run.held)
                run.stream = None
                return None

    def _pin(self, run: TaskRun) -> object:
        if self._engine.free_streams <= self._spare:
            self._pinning.append(run)
            return _WAIT
        run.stream = self._engine.open(self._prompter.pin(run.instruction))
        return None

    def _read(self, run: TaskRun, command: Read) -> object:
        segment = command.segment
        run.usage.segments += 1
        spans: list[tuple[int, int]] = []
        if command.vectors:
            spans = self._prompter.data(segment.text).spans(segment.sentences)
        request = Request(run.held, segment.ids, spans=spans)

        def read(request: Request) -> None:
            states = request.span_states
            self._advance(run, None if not command.vectors else states.numpy() if states is not None else ())

        self._submit(run, request, read)
        return _WAIT

    def _ask_later(self, run: TaskRun, question: str) -> object:
        ticket = self._ticket(run)
        if not self._engine.free_streams:

            def answered(text: str) -> None:
                run.answers[ticket.ordinal] = text
                self._advance(run, ticket)

            self._excursion(run, question, ticket, answered)
            return _WAIT
        fork = self._engine.fork(run.held)
        tokens = self._prompter.question(question, run.instruction)
        self._ask_aside(run, fork, tokens, ticket)
        return ticket

    def _ask_apart(self) -> None:
        """Give the streams that are free to the questions that wait for one."""
        while self._apart and self._engine.free_streams:
            run, command, ticket = self._apart.popleft()
            passages = [self._prompter.data(f"{passage}\n\n").ids for passage in command.passages]
            share = self._asking.room // max(1, len(passages))
            text = [token for ids in passages for token in ids[:share]]
            if not text:  # every note came out empty, and a model that is asked about nothing makes something up
                self._answer(run, ticket, "")
                continue
            stream = self._engine.open(self._prompter.pin(command.instruction))
            question = self._prompter.question(command.question, command.instruction)
            self._ask_aside(run, stream, (*text, *question), ticket)

    def _ask_aside(self, run: TaskRun, stream: Stream, tokens: tuple[int, ...], ticket: Ticket) -> None:
        """Generate an answer in a stream that is given back afterwards."""
        run.side_streams.add(stream)

        def answered(request: Request) -> None:
            run.side_streams.remove(stream)
            self._engine.close(stream)
            self._answer(run, ticket, self._text(run, request))

        self._submit(run, self._question(run, stream, tokens, ticket), answered)

    def _excursion(self, run: TaskRun, question: str, ticket: Ticket, then: Callable[[str], None]) -> None:
        tokens = self._prompter.question(question, run.instruction)
        request = self._question(run, run.held, tokens, ticket)
        request.excursion = True
        self._submit(run, request, lambda request: then(self._text(run, request)))

    def _question(self, run: TaskRun, stream: Stream, tokens: tuple[int, ...], ticket: Ticket) -> Request:
        asking = self._asking
        key = (run.document.source, run.document.row, ticket.ordinal)
        sampling = Sampling(asking.temperature, asking.top_p, asking.seed, key)
        return Request(stream, tokens, asking.answer_tokens, sampling, self._stop)

    def _submit(self, run: TaskRun, request: Request, answered: Callable[[Request], None]) -> None:
        self._engine.submit(request)
        self._running[request] = answered
        run.usage.input_tokens += len(request.tokens)

    def _text(self, run: TaskRun, request: Request) -> str:
        run.usage.output_tokens += len(request.generated)
        return self._prompter.text(request.generated)

    def _ticket(self, run: TaskRun) -> Ticket:
        run.asks += 1
        return Ticket(run.asks - 1)

    def _answer(self, run: TaskRun, ticket: Ticket, text: str) -> None:
        run.answers[ticket.ordinal] = text
        if run.gathering is not None:
            self._advance(run, self._gathered(run))

    def _gathered(self, run: TaskRun) -> object:
        """The answers that the task waits for, once all of them are there."""
        tickets: Any = run.gathering
        if any(ticket.ordinal not in run.answers for ticket in tickets):
            return _WAIT
        run.gathering = None
        return [run.answers.pop(ticket.ordinal) for ticket in tickets]

    def _end(self, run: TaskRun, result: Result | None, error: Exception | None) -> None:
        """Give everything back that the run holds; its requests go with their streams."""
        run.steps.close()
        streams = run.side_streams | ({run.stream} if run.stream is not None else set())
        self._running = {request: then for request, then in self._running.items() if request.stream not in streams}
        for stream in streams:
            self._engine.close(stream)
        self._apart = deque(waiting for waiting in self._apart if waiting[0] is not run)
        self._pinning = deque(waiting for waiting in self._pinning if waiting is not run)
        self._runs.remove(run)
        self._finished.append(Finished(run.document, result, error, run.usage))
