"""One summary for a document of any length, in constant memory.

Two styles. `notes`: the model writes a note at each segment boundary, and notes are merged group by group
(`notes.py`). `highlights`: the document's own sentences, chosen by what the reading pass computes anyway
(`highlights.py`), for models too small to be trusted with writing.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.documents import Document
from pipeline.segments import Segment
from pipeline.tasks.commands import Ask, AskLater, Close, Pin, Read, Result, Steps
from pipeline.tasks.highlights import HighlightPool
from pipeline.tasks.notes import NoteTree

INSTRUCTION = (
    "Summarize the text below in one short paragraph. "
    "Say only what the text says: who it is about, what happened, and why."
)
NOTE_PROMPT = (
    "Sum up the last part of the text above in two or three sentences. "
    "Use only names, numbers and facts that stand there."
)
_MERGE = "The text below is a series of notes on the parts of one long document, in order."


@dataclass(frozen=True)
class SummarizeOptions:
    """`room`: tokens of text that the window holds beside a question and its answer; `group`: notes that fit in."""

    style: str  # "notes" or "highlights"
    instruction: str
    note_prompt: str
    notes: str  # "none", "top" or "all"
    segment_tokens: int
    room: int
    group: int

    @property
    def merge_instruction(self) -> str:
        """Pinned before notes that are to be merged."""
        return merge_instruction(self.instruction)


def merge_instruction(instruction: str) -> str:
    """The instruction for merging the notes that were written under `instruction`."""
    return f"{instruction}\n\n{_MERGE}"


def summarize(document: Document, options: SummarizeOptions) -> Steps[Result]:
    """Reads the document once and returns its summary, with the notes or highlights that it rests on."""
    result = yield from (_highlights if options.style == "highlights" else _notes)(document, options)
    return replace(result, notes=None) if options.notes == "none" else result


def _highlights(document: Document, options: SummarizeOptions) -> Steps[Result]:
    pool = HighlightPool()
    yield Pin(options.instruction)
    for segment in document.segments(options.segment_tokens):
        pool.add(segment, (yield Read(segment, vectors=True)))
    yield Close()
    chosen = pool.best()
    return Result(" ".join(" ".join(note.text.split()) for note in chosen), tuple(chosen))


def _notes(document: Document, options: SummarizeOptions) -> Steps[Result]:
    segments = document.segments(options.segment_tokens)
    head, whole = _head(segments, options.room)
    if not head:  # nothing but white space, and a model asked about nothing makes something up
        return Result("")
    yield Pin(options.instruction)
    if whole:
        for segment in head:
            yield Read(segment)
        summary = yield Ask(options.instruction)
        yield Close()
        return Result(summary)
    tree = NoteTree(options.merge_instruction, options.instruction, options.group, keep_all=options.notes == "all")
    for segment in itertools.chain(head, segments):
        yield Read(segment)
        ticket = yield AskLater(options.note_prompt)
        yield from tree.expect(ticket, segment.start, segment.end)
    yield Close()
    return (yield from tree.finish())


def _head(segments: Iterator[Segment], room: int) -> tuple[list[Segment], bool]:
    """The first segments, and whether they are the whole document and fit the window together."""
    head: list[Segment] = []
    for segment in segments:
        head.append(segment)
        if sum(len(each.ids) for each in head) > room:
            return head, False
    return head, True
