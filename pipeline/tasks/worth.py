"""How well a sentence stands alone, judged by its form."""

import re

BARRED = 1.0  # from this reluctance on a sentence is not shown while there are others


def _words(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


_COMFORTABLE = (60, 320)  # characters
_LONGEST = 700
_VARIES = re.compile(r"[\d/_=:@\\]|\w[.\-~+]\w")  # numbers, times, paths, addresses, versions
_NO_WORD = re.compile(r"\W+")
_ALARM = re.compile(
    r"\b(?:errors?|fail(?:ed|ure|s)?|fatal|panic|critical|denied|refused|timed? ?out|warn(?:ing)?)\b", re.I
)
_WORD = re.compile(r"[^\W\d_]{2,}")
_LEADERS = re.compile(r"\.{4,}|(?:\. ){3,}|…{2,}|_{4,}|-{5,}|={5,}|\*{4,}")
_ENDED = re.compile(r"[.!?…。！？؟۔।][\"'”’»)\]*_」』）]*\Z")
# A log's line that is indented behind its time goes on from the line before.
_WRAPPED = re.compile(r"\A\d[\d:.,/T+-]*(?: [\d:.,/T+-]+)* {2,}\S")
# A sentence that opens so leans on the one before it.
_LEANING = _words(
    """and but or nor so then yet thus hence therefore however moreover also besides this that these those it its he his
    she her they their such here there both neither again indeed finally second secondly third instead
    otherwise still"""
)
_COURTESY = re.compile(
    r"\b(?:thank(?:s| you)|ladies and gentlemen|good (?:night|evening|morning)|god bless|welcome)\b", re.I
)


def fold(text: str) -> str:
    """The text's constant words: equal for headers, page lines and log lines that differ in numbers and names only."""
    kept: list[str] = []
    for part in text.casefold().split():
        word = "0" if _VARIES.search(part) else _NO_WORD.sub("", part)
        if word and not (word == "0" and kept[-1:] == ["0"]):
            kept.append(word)
    return " ".join(kept)


def reluctance(text: str) -> float:
    """What to take off a sentence's centrality (a cosine) before it is shown alone; `BARRED` and more: a fragment."""
    words = _WORD.findall(text)
    letters = sum(map(len, words))
    cut = _LEADERS.search(text) or _WRAPPED.match(text)
    if len(text) > _LONGEST or len(words) < 3 or cut or _is_shouted(text, words):
        return BARRED
    shortest, longest = _COMFORTABLE
    total = max(0.0, (shortest - len(text)) / 100) + max(0.0, (len(text) - longest) / 1000)
    if not _ENDED.search(text):
        # Records have no full stop; a line of words without one is the start of something.
        record = letters < 0.75 * len(text)
        total += 0.1 if record else 0.3
        total -= 0.2 * bool(record and _ALARM.search(text))
    total += 0.1 * (words[0].casefold() in _LEANING)
    total += 0.1 * text.rstrip("\"'”’)]").endswith("?")
    total += 0.2 * bool(_COURTESY.search(text))
    total += 0.1 * _is_unbalanced(text)
    total += 0.15 * (letters < 0.5 * len(text))
    return total


def _is_shouted(text: str, words: list[str]) -> bool:
    return text.isupper() and len(words) < 12


def _is_unbalanced(text: str) -> bool:
    """Whether a quotation or bracket is opened and not closed, or the other way round."""
    pairs = (("(", ")"), ("[", "]"), ("“", "”"), ("«", "»"))
    return text.count('"') % 2 == 1 or any(text.count(left) != text.count(right) for left, right in pairs)
