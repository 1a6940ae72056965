"""Notes merged level by level while reading goes on, so that a document of any length holds only a few of them."""

from collections import deque
from dataclasses import dataclass

from pipeline.tasks.commands import AskApart, Gather, Note, Result, Steps, Ticket

AWAITED = 8  # groups of notes: a long document that is alone must fill passes with its own answers


@dataclass(frozen=True)
class _Node:
    note: Note
    parts: tuple[Note, ...] = ()  # what it was merged from


class NoteTree:
    """A note of level k stands for `group` notes of level k - 1; a full group is merged at once, in a fresh stream.

    At most `AWAITED * group` answers are awaited and fewer than `group` notes a level are held (with `keep_all`, every
    note as well). Which notes are merged depends on the order of asking alone, never on which answer comes first.
    """

    def __init__(self, instruction: str, question: str, group: int, *, keep_all: bool = False) -> None:
        self._instruction = instruction
        self._question = question
        self._group = group
        self._levels: list[list[_Node]] = []
        self._awaited: deque[tuple[Ticket, int, _Node]] = deque()
        self._all: list[Note] | None = [] if keep_all else None

    def expect(self, ticket: Ticket, start: int, end: int) -> Steps[None]:
        """Takes in the ticket of a note on the source's range `[start, end)`."""
        self._awaited.append((ticket, 0, _Node(Note(start, end, ""))))
        if len(self._awaited) >= AWAITED * self._group:
            yield from self._redeem(self._group)

    def finish(self) -> Steps[Result]:
        """Merges what is left, lowest level first; the last note is the summary, and those merged into it its notes."""
        while self._awaited:
            yield from self._redeem(len(self._awaited))
        late: list[_Node] = []  # of lower levels, so later in the document than all of this one
        for level in self._levels:
            late = [*level, *late]
            if len(late) > 1:
                ticket, node = yield from self._merge(late)
                [answer] = yield Gather((ticket,))
                late = [self._written(node, answer)]
        [top] = late
        notes = self._all[:-1] if self._all is not None else top.parts
        return Result(top.note.text, tuple(notes) or None)

    def _redeem(self, count: int) -> Steps[None]:
        asked = [self._awaited.popleft() for _ in range(count)]
        answers = yield Gather(tuple(ticket for ticket, _, _ in asked))
        for (_, level, node), answer in zip(asked, answers, strict=True):
            if level == len(self._levels):
                self._levels.append([])
            nodes = self._levels[level]
            nodes.append(self._written(node, answer))
            if len(nodes) == self._group:
                self._levels[level] = []
                ticket, merged = yield from self._merge(nodes)
                self._awaited.append((ticket, level + 1, merged))

    def _merge(self, nodes: list[_Node]) -> Steps[tuple[Ticket, _Node]]:
        notes = tuple(node.note for node in nodes)
        texts = tuple(note.text for note in notes if note.text)
        ticket = yield AskApart(self._instruction, texts, self._question)
        return ticket, _Node(Note(notes[0].start, notes[-1].end, ""), notes)

    def _written(self, node: _Node, answer: str) -> _Node:
        note = Note(node.note.start, node.note.end, answer)
        if self._all is not None:
            self._all.append(note)
        return _Node(note, node.parts)
