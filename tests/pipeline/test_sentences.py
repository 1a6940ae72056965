import random
from itertools import pairwise

import pytest

from pipeline.sentences import Break, sentences, units


def found(text: str) -> list[str]:
    return [text[start:end] for start, end in sentences(text)]


PROSE = """\
Mr. Vice President, Mr. Speaker, Members of the 88th Congress:

I congratulate you all--not merely on your electoral victory but on your selected role in history. For you
and I are privileged to serve the great Republic. [Applause] In Jan. 1961 we met at No. 5 Main St. in the U.S.
Capitol. It cost $3.5 million, i.e. too much, under sec. 12 of the act. "Stop!" he cried. So it was.

LOOKING AHEAD

The Hon. J. F. Smith Jr. of Acme Inc. spoke at 3 p.m. He lives in the U.S. We do not.
Was it enough? Perhaps... Yet we go on.

JOHN F. KENNEDY
THE WHITE HOUSE, January 14, 1963"""

VERSE = """\
PARADISE LOST
BOOK I.

  Of Mans First Disobedience, and the Fruit
Of that Forbidden Tree, whose mortal tast
Sing Heav'nly Muse, that on the secret top
Of OREB, or of SINAI, didst inspire
Things unattempted yet in Prose or Rhime.
And justifie the wayes of God to men.
  Say first, for Heav'n hides nothing from thy view
Who first seduc'd them to that fowl revolt?
Th' infernal Serpent; he it was.
"""

LOG = """\
Jan 12 10:00:01 host sshd[12]: Accepted publickey for bob from 10.0.0.1. Welcome.
Jan 12 10:00:02 host sshd[12]: session opened
--------------------------
2024-01-12T10:00:03Z INFO started
"""

PACKAGES = """\
Reading package lists...
Building dependency tree...
The following NEW packages will be installed:
  libx11-6 libx11-data libxau6 libxcb1 libxdmcp6
0 upgraded, 5 newly installed, 0 to remove and 0 not upgraded.
Get:1 http://deb.example.org/debian stable/main amd64 libxau6 amd64 1:1.0.9-1 [19.7 kB]
Selecting previously unselected package libxau6:amd64.
Preparing to unpack .../libxau6_1%3a1.0.9-1_amd64.deb ...
Unpacking libxau6:amd64 (1:1.0.9-1) ...
"""


def test_prose() -> None:
    assert found(PROSE) == [
        "I congratulate you all--not merely on your electoral victory but on your selected role in history.",
        "For you\nand I are privileged to serve the great Republic.",
        "In Jan. 1961 we met at No. 5 Main St. in the U.S.\nCapitol.",
        "It cost $3.5 million, i.e. too much, under sec. 12 of the act.",
        '"Stop!" he cried.',
        "So it was.",
        "The Hon. J. F. Smith Jr. of Acme Inc. spoke at 3 p.m.",
        "He lives in the U.S.",
        "We do not.",
        "Was it enough?",
        "Yet we go on.",
    ]


def test_verse_is_cut_at_its_sentences_not_at_its_lines() -> None:
    assert [line.split("\n")[0] for line in found(VERSE)] == [
        "Of Mans First Disobedience, and the Fruit",
        "And justifie the wayes of God to men.",
        "Say first, for Heav'n hides nothing from thy view",
        "Th' infernal Serpent; he it was.",
    ]


def test_a_logs_sentences_are_its_lines() -> None:
    lines = LOG.splitlines()
    assert found(LOG) == [lines[0], lines[1], lines[3]]
    assert found(PACKAGES) == [line.strip() for line in PACKAGES.splitlines()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \n\t\n", []),
        ("A title", []),
        ("Chapter One\n\nIt was dark. It", ["It was dark."]),
        ("# Notes\nThe first is here.\nThe second\nis there.", ["The first is here.", "The second\nis there."]),
        ("- Sales grew by five percent this year\n- Costs fell\n- The board agreed.\n", None),
        ("1. The first one. It grows.\n2. The second one.\n", ["The first one.", "It grows.", "The second one."]),
        ("and so it ended. The rest is silence.", ["The rest is silence."]),
        ("これは文です。次の文です！終わり。", ["これは文です。", "次の文です！", "終わり。"]),
        ("यह एक वाक्य है। दूसरा वाक्य।", ["यह एक वाक्य है।", "दूसरा वाक्य।"]),
        ("هل هذا سؤال؟ هذه جملة.", ["هل هذا سؤال؟", "هذه جملة."]),
        ("One line.\r\nTwo lines\r\nhere.\r\n\r\nAnd three.\r\n", ["One line.", "Two lines\r\nhere.", "And three."]),
        ("Old Mac line\rgoes on.\r\rNext one here.", ["Old Mac line\rgoes on.", "Next one here."]),
        ("We propose:\n\n--A cut in taxes.\n--An act, as in A. v. B.\n", ["A cut in taxes.", "An act, as in A. v. B."]),
        ("Legislative Veto.\n\nWe oppose it.", ["We oppose it."]),
        ("He said (in 1999.) Then he left.", ["He said (in 1999.)", "Then he left."]),
        ("See fig. 3. The line rises.", ["See fig. 3.", "The line rises."]),
        ("So am I. The end came.", ["So am I.", "The end came."]),
        ("Thank you. [Applause] We will win. [Laughter]", ["Thank you.", "We will win."]),
        ("so um yeah we went there\nit was fun you know\n", ["so um yeah we went there", "it was fun you know"]),
        ('{"a": 1, "b": "x"}\n{"a": 2, "b": "y"}\n', ['{"a": 1, "b": "x"}', '{"a": 2, "b": "y"}']),
    ],
)
def test_small_cases(text: str, expected: list[str] | None) -> None:
    if expected is None:
        expected = ["Sales grew by five percent this year", "The board agreed."]
    assert found(text) == expected


def test_a_transcript_without_punctuation_is_given_in_parts() -> None:
    text = "um so we then went on " * 100
    parts = found(text)
    assert len(parts) > 5
    assert all(len(part) <= 300 and part == part.strip() for part in parts)
    assert " ".join(parts) == text.strip()


@pytest.mark.parametrize("text", [PROSE, VERSE, LOG, PACKAGES])
def test_units_cover_the_text(text: str) -> None:
    for cut in range(0, len(text), 7):
        part = text[:cut]
        whole = list(units(part))
        assert "".join(part[unit.start : unit.end] for unit in whole) == part
        # What is left open when the text goes on is the last unit, and only that.
        assert list(units(part, complete=False)) in (whole, whole[:-1])
        for unit in whole:
            if unit.sentence is not None:
                assert unit.start <= unit.sentence[0] < unit.sentence[1] <= unit.end


def test_a_heading_is_the_worst_place_for_a_cut() -> None:
    kinds = {PROSE[unit.start : unit.end].strip(): unit.after for unit in units(PROSE)}
    assert kinds["LOOKING AHEAD"] == Break.HEADING
    assert kinds["Yet we go on."] == Break.PARAGRAPH
    assert kinds["Was it enough?"] == Break.SENTENCE
    assert {unit.after for unit in units(LOG)} == {Break.LINE, Break.PARAGRAPH}


def test_sentences_never_overlap_in_any_text() -> None:
    random_ = random.Random(0)
    parts = ["Mr. ", "word ", "The ", "end. ", "\n", "\n\n", '"', "é", "A. ", "! ", "12:00:01 x\n", "# ", "- a "]
    for _ in range(300):
        text = "".join(random_.choices(parts, k=random_.randrange(60)))
        ranges = sentences(text)
        assert all(a[1] <= b[0] for a, b in pairwise(ranges))
        assert all(text[start:end].strip() == text[start:end] != "" for start, end in ranges)
