"""Tasks as generators, driven without a model: what they command, and what they make of the answers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pipeline.documents import Document
from pipeline.inputs import InputFile
from pipeline.rows import Place, Row
from pipeline.segments import segment_document
from pipeline.tasks import TASKS
from pipeline.tasks.commands import Ask, AskApart, AskLater, Close, Gather, Note, Pin, Read, Result, Ticket
from pipeline.tasks.highlights import HighlightPool
from pipeline.tasks.notes import AWAITED
from pipeline.tasks.summarize import SummarizeOptions, summarize
from pipeline.tasks.worth import BARRED, fold, reluctance

FILE = InputFile(0, "in.jsonl", "jsonl", None, 0, "")


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def document(text: str) -> Document:
    return Document(Row(FILE, Place(), text=text), words)


def options(**changes: Any) -> SummarizeOptions:
    given = {"style": "notes", "notes": "top", "segment_tokens": 16, "room": 40, "group": 3, **changes}
    return SummarizeOptions(instruction="Sum up.", note_prompt="Note.", **given)


@dataclass
class Driver:
    """Carries commands out: a note says which segment was read last, a merged one what it was merged from."""

    commands: list[Any] = field(default_factory=list)
    answers: dict[int, str] = field(default_factory=dict)
    read: int = 0
    open: bool = False
    most_answers: int = 0

    def run(self, steps: Any) -> Result:
        value: Any = None
        while True:
            try:
                command = steps.send(value)
            except StopIteration as end:
                assert not self.open
                result: Result = end.value
                return result
            self.commands.append(command)
            value = self.perform(command)

    def perform(self, command: Any) -> Any:
        match command:
            case Pin():
                assert not self.open
                self.open = True
            case Close():
                assert self.open
                self.open = False
            case Read(segment, vectors):
                self.read += 1
                return np.ones((len(segment.sentences), 4), np.float32) if vectors else None
            case Ask():
                return "whole"
            case AskLater():
                return self.ticket(f"n{self.read - 1}")
            case AskApart(_, passages, _):
                return self.ticket(f"({' '.join(passages)})")
            case Gather(tickets):
                return [self.answers.pop(ticket.ordinal) for ticket in tickets]
        return None

    def ticket(self, answer: str) -> Ticket:
        ordinal = sum(isinstance(each, (AskLater, AskApart)) for each in self.commands)
        self.answers[ordinal] = answer
        self.most_answers = max(self.most_answers, len(self.answers))
        return Ticket(ordinal)


def sentence_words(count: int) -> str:
    """`count` sentences of eight words: two to a segment of sixteen."""
    return " ".join(f"Ship number {index} left the harbour that morning." for index in range(count))


def test_a_document_that_fits_takes_one_step() -> None:
    driver = Driver()
    result = driver.run(summarize(document(sentence_words(4)), options()))
    assert result == Result("whole")
    assert [type(command) for command in driver.commands] == [Pin, Read, Read, Ask, Close]


@pytest.mark.parametrize("style", ["notes", "highlights"])
def test_nothing_is_asked_about_white_space(style: str) -> None:
    driver = Driver()
    assert driver.run(summarize(document(" \n "), options(style=style))).summary == ""
    assert not any(isinstance(command, (Ask, Read)) for command in driver.commands)


def test_notes_are_merged_in_groups_and_in_order() -> None:
    driver = Driver()
    text = sentence_words(20)
    result = driver.run(summarize(document(text), options()))
    assert driver.read == 10
    assert result.summary == "(((n0 n1 n2) (n3 n4 n5) (n6 n7 n8)) n9)"
    assert result.notes is not None
    assert [note.text for note in result.notes] == ["((n0 n1 n2) (n3 n4 n5) (n6 n7 n8))", "n9"]
    assert (result.notes[0].start, result.notes[-1].end) == (0, len(text))
    assert result.notes[0].end == result.notes[1].start


def test_every_note_on_request_and_none_on_request() -> None:
    every = Driver().run(summarize(document(sentence_words(20)), options(notes="all"))).notes
    assert every is not None
    assert sorted(note.text for note in every if not note.text.startswith("(")) == [f"n{index}" for index in range(10)]
    assert Driver().run(summarize(document(sentence_words(20)), options(notes="none"))).notes is None


def test_what_is_held_does_not_grow_with_the_document() -> None:
    few, many = Driver(), Driver()
    few.run(summarize(document(sentence_words(60)), options()))
    many.run(summarize(document(sentence_words(1200)), options()))
    assert many.read == 20 * few.read
    assert many.most_answers <= few.most_answers + 1 <= AWAITED * options().group + 2


@pytest.mark.parametrize("segments", range(3, 30))
def test_any_number_of_segments_is_covered(segments: int) -> None:
    driver = Driver()
    result = driver.run(summarize(document(sentence_words(2 * segments)), options()))
    flat = result.summary.replace("(", " ").replace(")", " ").split()
    assert flat == [f"n{index}" for index in range(segments)]


def highlights(text: str, vector_of: Any = None) -> list[Note]:
    pool = HighlightPool()
    for segment in segment_document([text], words, 200):
        vectors = [
            vector_of(segment.text[a:b]) if vector_of else hashed(segment.text[a:b]) for a, b in segment.sentences
        ]
        pool.add(segment, np.array(vectors, np.float32).reshape(len(vectors), 8))
    found = pool.best()
    for note in found:
        assert text[note.start : note.end] == note.text
    return found


def hashed(text: str) -> Any:
    return np.random.default_rng(sum(text.encode())).normal(size=8)


def prose(count: int) -> Iterator[str]:
    topics = ["harbour", "railway", "orchard", "library", "treasury", "garrison"]
    for index in range(count):
        topic, other = topics[index * 6 // count], topics[(index * 7 + 3) % 6]
        town = chr(97 + index % 26) + chr(97 + index // 26 % 26)
        yield f"The {topic} of town {town} was praised by the {other}'s own keeper."


def test_highlights_come_from_all_thirds_and_are_few() -> None:
    text = " ".join(prose(600))
    found = highlights(text)
    assert {3 * note.start // len(text) for note in found} == {0, 1, 2}
    assert len(found) == 9
    assert [note.start for note in found] == sorted(note.start for note in found)


def test_a_short_text_has_few_highlights() -> None:
    assert len(highlights(" ".join(prose(9)))) <= 3


def test_the_most_central_sentence_is_taken_and_its_likeness_is_not() -> None:
    sentences = list(prose(12))
    sentences[1:4] = [
        f"The council of the {place} has raised the tax on salt and grain." for place in ("north", "south", "west")
    ]

    def vector(text: str) -> Any:
        base = np.zeros(8)
        base[0] = 5.0 if "council" in text else -1.0
        return base + 0.3 * hashed(text) * ("council" not in text) + 0.01 * hashed(text)

    found = [note.text for note in highlights(" ".join(sentences), vector)]
    assert sum("council" in text for text in found) == 1


def test_fragments_headers_contents_and_repetitions_are_not_taken() -> None:
    body = list(prose(30))
    junk = [
        "THE ANNUAL REPORT OF THE HARBOUR BOARD",
        "Chapter 2 ............................................ 14",
        "Page 17",
        "This page is printed on paper from the board's own mill.",
        "and so it went on",
    ]
    text = "\n\n".join(
        part for index, sentence in enumerate(body) for part in (sentence, junk[index % 5].replace("17", str(index)))
    )
    found = [note.text for note in highlights(text)]
    assert found
    assert set(found) <= set(body)


@pytest.mark.parametrize("text", ["Yes.", "Hello world", "no stop here at all", "1 2 3", "Wait! What?", "…"])
def test_tiny_texts_give_something(text: str) -> None:
    [first, *_] = highlights(text)
    assert first.text in text


def test_nothing_gives_nothing() -> None:
    assert HighlightPool().best() == []


def test_a_huge_document_is_held_in_part_and_still_covered() -> None:
    pool, end = HighlightPool(), 0
    for index in range(600):
        text = " ".join(
            f"The {word} of parish {index} sold {word}s to the {word} guild."
            for word in ("mill", "farm", "well", "barn")
        )
        segment = next(segment_document([text], words, 200, start=end))
        pool.add(segment, np.array([hashed(text[a:b]) for a, b in segment.sentences], np.float32))
        end = segment.end
    assert len(pool._held) <= 512
    # All parishes fold to the same four sentences: one for each third is shown, rather than nothing.
    assert 1 <= len(pool.best()) <= 3


def test_lines_that_differ_in_names_and_numbers_only_are_repetitions() -> None:
    assert fold("18:30:39 Unpacking libcurl4:amd64 (7.88.1-10) ...") == fold(
        "18:31:02 Unpacking gcc-12 (12.2.0-14) ..."
    )
    assert fold("18:30:39 disk full") != fold("18:30:39 disk found")


def test_of_a_log_the_unusual_lines_are_taken() -> None:
    lines = [f"2026-11-30 18:{index // 60:02d}:{index % 60:02d} GET /page/{index} 200" for index in range(300)]
    for index, what in (
        (40, "disk sda1 is full, write failed"),
        (150, "certificate of host web-3 expired"),
        (270, "kernel panic on node-7"),
    ):
        lines[index] = f"2026-11-30 18:{index // 60:02d}:{index % 60:02d} {what}"
    found = highlights("\n".join(lines) + "\n")
    assert ["full" in found[0].text, "certificate" in found[1].text, "panic" in found[2].text] == [True] * 3
    assert len(found) == 3


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("The treaty was ratified by the Senate on the third of May, after long debate.", "It was ratified."),
        (
            "The treaty was ratified by the Senate on the third of May, after long debate.",
            "Thank you, ladies and gentlemen, and good night to all of you here.",
        ),
        (
            "The treaty was ratified by the Senate on the third of May, after long debate.",
            "And they were, as I said before, all of them against it in those days.",
        ),
        (
            "The treaty was ratified by the Senate on the third of May, after long debate.",
            "Was the treaty ratified by the Senate on the third of May, after long debate?",
        ),
        (
            "The treaty was ratified by the Senate on the third of May, after long debate.",
            'He said, "The treaty was ratified by the Senate on the third of May.',
        ),
    ],
)
def test_sentences_that_stand_alone_are_preferred(better: str, worse: str) -> None:
    assert reluctance(better) < reluctance(worse)


@pytest.mark.parametrize("text", ["CONTENTS OF THE VOLUME", "Preface . . . . . . . 7", "x 1", "word " * 200])
def test_what_is_no_sentence_is_barred(text: str) -> None:
    assert reluctance(text) >= BARRED


def test_the_registry_knows_summarize() -> None:
    assert TASKS["summarize"].run is summarize


def test_a_wrapped_line_of_a_log_is_no_highlight_but_the_line_itself_is() -> None:
    assert reluctance("2026-11-30 18:30:45   | sqop | pgpainless-cli sensible-utils git") >= BARRED
    assert reluctance("2026-11-30 18:31:08 invoke-rc.d: WARNING: No init system and policy-rc.d missing!") < BARRED
    assert reluctance("1850 was the year in which the whole country spoke of nothing but the railways.") < BARRED
