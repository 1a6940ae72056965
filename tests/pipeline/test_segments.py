import random
import re
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.segments import Segment, segment_document
from pipeline.text import printable

PIECES = re.compile(r"\s*\w{1,4}|\s*[^\w\s]|\s+")
Encode = Callable[[str], list[int]]


def words(text: str) -> list[int]:
    return [hash(piece) for piece in PIECES.findall(text)]


def utf8(text: str) -> list[int]:
    return list(text.encode())


def more_when_joined(text: str) -> list[int]:
    """A tokenizer whose whole is more than the sum of its parts."""
    return words(text) + [0] * (len(text) // 50)


ENCODERS: tuple[Encode, ...] = (words, utf8, more_when_joined)
ALPHABETS = [
    list("ab .\n"),
    list('Ab .!?\n\r"'),
    ["word ", "The ", "end. ", "\n", "\n\n", "x" * 40, "é", "\u0301", "😀", "\u200d", "\ufeff", "\r\n", "Mr. ", "# H"],
    ["12:00:01 log line 5\n", "A. ", "\udc80", "\udcff", "Text. ", "\ufeff"],
    ["x"],
    ["\n"],
    [" "],
    ["。", "文", "字"],
]


def cut(text: str, encode: Encode, limit: int, size: int = 0, **options: object) -> list[Segment]:
    pieces = [text[n : n + size] for n in range(0, len(text), size)] if size else [text]
    return list(segment_document(pieces, encode, limit, **options))  # type: ignore[arg-type]


def random_texts(count: int) -> list[str]:
    random_ = random.Random(7)
    return ["".join(random_.choices(random_.choice(ALPHABETS), k=random_.randrange(1500))) for _ in range(count)]


def test_nothing_is_lost_whatever_the_text() -> None:
    random_ = random.Random(1)
    for text in random_texts(80):
        encode, limit = random_.choice(ENCODERS), random_.choice([16, 17, 40, 100, 500])
        found = cut(text, encode, limit)
        assert "".join(segment.text for segment in found) == printable(text.replace("\ufeff", ""))
        assert all(segment.ids == encode(segment.text) and len(segment.ids) <= limit for segment in found)
        assert [0, *(segment.end for segment in found)] == [*(segment.start for segment in found), len(text)]


def test_cuts_do_not_depend_on_how_the_text_arrives() -> None:
    random_ = random.Random(2)
    for text in random_texts(30):
        encode, limit = random_.choice(ENCODERS), random_.choice([16, 40, 100])
        whole = cut(text, encode, limit)
        for size in (1, 7, 1000):
            assert cut(text, encode, limit, size) == whole
        assert list(segment_document(["", text[:5], "", text[5:], ""], encode, limit)) == whole


def test_cutting_can_start_again_at_any_segments_end() -> None:
    random_ = random.Random(3)
    for text in random_texts(30):
        encode, limit = random_.choice(ENCODERS), random_.choice([16, 40, 100])
        whole = cut(text, encode, limit)
        for place in {0, len(whole) // 2, len(whole) - 1} if whole else ():
            end = whole[place].end
            assert cut(text[end:], encode, limit, start=end) == whole[place + 1 :]


def test_offsets_in_bytes_lead_back_to_the_source() -> None:
    for text in random_texts(30):
        data = text.encode("utf-8", "surrogateescape")
        for segment in cut(text, words, 50, unit="bytes"):
            raw = data[segment.start : segment.end].decode("utf-8", "surrogateescape")
            assert printable(raw.replace("\ufeff", "")) == segment.text
            for start, end in segment.sentences:
                raw = data[segment.locate(start) : segment.locate(end)].decode("utf-8", "surrogateescape")
                assert printable(raw.replace("\ufeff", "")) == segment.text[start:end]


PARAGRAPH = "The first sentence of it is here. The second one follows. A third ends it.\n\n"


def test_paragraphs_are_kept_whole_where_they_can_be() -> None:
    found = cut(PARAGRAPH * 40, words, 100)
    assert all(segment.text.endswith("ends it.\n\n") for segment in found)
    assert all(len(segment.ids) > 60 for segment in found)


def test_sentences_are_kept_whole_in_a_long_paragraph() -> None:
    found = cut("The long paragraph goes on and on for ever. " * 200, words, 100)
    assert all(segment.text.endswith("ever. ") and segment.text.startswith("The") for segment in found)
    assert all(segment.text[start:end].endswith("ever.") for segment in found for start, end in segment.sentences)


def test_log_lines_are_kept_whole() -> None:
    log = "".join(f"Jan 12 10:00:{n % 60:02d} host daemon[{n}]: event {n} done. Next\n" for n in range(500))
    found = cut(log, words, 200)
    assert all(segment.text.endswith("\n") for segment in found)
    assert sum(len(segment.sentences) for segment in found) == 500


def test_a_heading_stays_with_its_text() -> None:
    found = cut("THE HEADING HERE\n\n" + PARAGRAPH * 2 + "\n", words, 80)
    text = (PARAGRAPH * 2 + "NEW HEADING\n\n") * 20
    assert found[0].text.startswith("THE HEADING")
    assert not any(segment.text.rstrip().endswith("HEADING") for segment in cut(text, words, 100)[:-1])


def test_the_rest_is_halved_rather_than_left_tiny() -> None:
    text = PARAGRAPH * 5 + "A last word here.\n"
    limit = len(words(PARAGRAPH * 5))
    first, second = cut(text, words, limit)
    assert min(len(first.ids), len(second.ids)) > limit / 4


def test_a_text_that_fits_is_one_segment() -> None:
    (segment,) = cut(PARAGRAPH * 3, words, len(words(PARAGRAPH * 3)))
    assert segment.text == PARAGRAPH * 3


@pytest.mark.parametrize(
    "text",
    ["x" * 5000, "e\u0301\u0302" * 2000, "👩\u200d👩\u200d👧" * 500, "🇫🇷" * 800, "🤝🏽" * 800, "क्षि" * 800],
    ids=["letters", "accents", "family", "flags", "skin", "devanagari"],
)
def test_only_a_monster_is_cut_inside_and_never_inside_a_sign(text: str) -> None:
    found = cut(text, utf8, 64)
    assert "".join(segment.text for segment in found) == text
    for segment in found[1:]:
        first = segment.text[0]
        assert unicodedata.category(first)[0] != "M"
        assert first not in ("\u200d", "\U0001f3fd", "🇷")


def test_long_words_without_sentences_are_cut_between_words() -> None:
    found = cut("unpunctuated words go on " * 400, words, 64)
    assert all(segment.text.endswith(" ") for segment in found)
    assert all(len(segment.ids) > 40 for segment in found[:-1])


def test_small_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="less than 16"):
        cut("text", words, 15)


def test_time_is_linear_and_the_tokenizer_sees_each_text_a_few_times_only() -> None:
    line = "Jan 12 10:00:01 host daemon[123]: session opened for user root by uid 0\n"
    seen = 0

    def encode(text: str) -> list[int]:
        nonlocal seen
        seen += len(text)
        return [0] * (len(text) // 3)

    def seconds(text: str) -> float:
        begin = time.process_time()
        assert sum(len(segment.text) for segment in segment_document([text], encode, 1000)) == len(text)
        return time.process_time() - begin

    seconds(line * 1000)
    small, large = min(seconds(line * 7000) for _ in range(3)), seconds(line * 70_000)
    assert large < 30 * small
    assert len(line) * 70_000 / large > 2_000_000  # bytes a second
    for text in (line * 7000, "x" * 500_000, "word " * 100_000):
        seen = 0
        seconds(text)
        assert seen < 5 * len(text)


MEMORY = r"""
import re, sys
from pathlib import Path
from pipeline.documents import Document, read_rows
from pipeline.inputs import resolve_inputs
(row,) = read_rows(resolve_inputs([sys.argv[1]]).files[0])
document = Document(row, lambda text: [0] * (len(text) // 3))
print(sum(segment.end - segment.start for segment in document.segments(1000)))
print(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_a_30_mb_log_takes_no_more_memory_than_a_small_one(tmp_path: Path) -> None:
    line = "Jan 12 10:00:01 host daemon[%d]: session opened for user root by uid 0 (caf\u00e9)\n"
    peaks = []
    for lines in (1000, 380_000):
        path = tmp_path / f"{lines}.log"
        with path.open("w", encoding="utf-8") as file:
            file.writelines(line % n for n in range(lines))
        run = subprocess.run([sys.executable, "-c", MEMORY, path], check=True, capture_output=True, text=True)
        size, peak = map(int, run.stdout.split())
        assert size == path.stat().st_size
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 15_000  # KB
