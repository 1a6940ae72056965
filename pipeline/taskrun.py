"""One document's task while it runs: its stream, what it waits for, and what it has used."""

from dataclasses import dataclass, field

from pipeline.documents import Document
from pipeline.tasks.commands import Result, Steps, Ticket
from streamllm_core import Stream


@dataclass
class Usage:
    """Tokens read (text and questions; not the shared pin) and written for one document, and its segments."""

    input_tokens: int = 0
    output_tokens: int = 0
    segments: int = 0


@dataclass(frozen=True)
class Finished:
    """A document whose task has ended, with its result or the exception that ended it."""

    document: Document
    result: Result | None
    error: Exception | None
    usage: Usage


@dataclass(frozen=True)
class Asking:
    """How answers are generated. `room`: tokens of text that the window holds beside a question and its answer."""

    answer_tokens: int
    room: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(eq=False)
class TaskRun:
    """One document's task: where it is, and what it is waiting for."""

    document: Document
    steps: Steps[Result]
    stream: Stream | None = None
    instruction: str = ""
    asks: int = 0
    answers: dict[int, str] = field(default_factory=dict)  # given, not yet gathered
    gathering: tuple[Ticket, ...] | None = None
    side_streams: set[Stream] = field(default_factory=set)  # of forks and fresh streams, which outlive no run
    usage: Usage = field(default_factory=Usage)

    @property
    def held(self) -> Stream:
        """The stream that the task has open."""
        if self.stream is None:
            raise RuntimeError("the task has no stream open: it must yield Pin first")
        return self.stream
