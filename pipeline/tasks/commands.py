"""What a task may ask of the runner. A task is a generator that yields these and is sent their results.

A task holds at most one stream, from `Pin` to `Close`. Everything else that it wants asked (`AskLater`, `AskApart`)
needs one stream for itself and nothing more, so it always ends; that is why no two documents can wait for each other.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from pipeline.segments import Segment


@dataclass(frozen=True)
class Ticket:
    """Stands for an answer to come; `ordinal` counts the document's asks, in the order in which they were asked."""

    ordinal: int


@dataclass(frozen=True)
class Pin:
    """Open a stream whose sinks are the prompt up to the document. Sends back None."""

    instruction: str


@dataclass(frozen=True)
class Read:
    """Advance the stream by one segment of the document.

    Sends back None, or with `vectors` a float32 array `[sentences, hidden]`: for each of the segment's sentences the
    mean hidden state of its tokens at two thirds of the depth.
    """

    segment: Segment
    vectors: bool = False


@dataclass(frozen=True)
class Ask:
    """Ask about what the stream holds, and forget the question. Sends back the answer's text."""

    question: str


@dataclass(frozen=True)
class AskLater:
    """The same on a fork, while reading goes on; on the stream itself when no fork is free. Sends back a `Ticket`."""

    question: str


@dataclass(frozen=True)
class AskApart:
    """Ask about `passages`, read one after the other in a fresh stream. Sends back a `Ticket`.

    Each passage is cut to its equal share of what the window holds beside the question and its answer.
    """

    instruction: str
    passages: tuple[str, ...]
    question: str


@dataclass(frozen=True)
class Gather:
    """Wait for answers. Sends back their texts as a list, in the order of `tickets`; each ticket is redeemed once."""

    tickets: tuple[Ticket, ...]


@dataclass(frozen=True)
class Close:
    """Give the stream back. Sends back None."""


Command = Pin | Read | Ask | AskLater | AskApart | Gather | Close


@dataclass(frozen=True)
class Note:
    """A text about, or out of, the source's range `[start, end)`: code points, or bytes for a text file."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Result:
    """What a task found out: the columns that it adds to the record."""

    summary: str
    notes: tuple[Note, ...] | None = None


# What is sent back differs from command to command, which a generator's type cannot say.
T = TypeVar("T")
Steps = Generator[Command, Any, T]
