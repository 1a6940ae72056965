"""Where sentences end inside flowing text: punctuation, told apart from abbreviations, initials and list numbers."""

import re
from collections.abc import Iterator

# A full stop (or more), then what closes with it, then a gap; scripts that write no gap need none.
_END = re.compile(r"""[.!?…؟۔।]+["'”’»)\]*_]*(?=\s)|[。！？｡]+[」』”’）"]*""")
_OPENING = "\"'“‘«([*_—–-"
_NEXT_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_LAST_WORD = re.compile(r"[^\s(\[\"“‘«—–-]*\Z")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]{1,2}\Z")
_ROMAN = re.compile(r"[IVXLCDMivxlcdm]+\Z")
_STAGE_DIRECTION = re.compile(r"\s*[\[(][A-Z][^\[\]()\n]{2,40}[\])](?=\s|\Z)")


def _words(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


_NEVER_LAST = _words(
    """mr mrs ms dr prof messrs mme mlle st mt ft gen brig col lt capt cpt cmdr sgt maj adm gov sen rep reps hon rev fr
    pres supt v vs viz cf e.g i.e approx ca al"""
)
_BEFORE_NUMBER = _words(
    """no nos p pp vol vols ch chap chaps sec secs sect art arts fig figs par pars para eq eqs pt stat bk l ll
    jan feb mar apr jun jul aug sept sep oct nov dec"""
)
_BEFORE_ROMAN = _words("no nos vol ch chap art bk")
_SOMETIMES_LAST = _words("inc ltd co corp bros jr sr esq etc dept univ assn assoc govt ave blvd rd")
# Words that seldom follow an abbreviation inside a sentence with a capital: after "in the U.S.", "The" begins anew.
_STARTERS = _words(
    """The This That These Those There They Their He His She Her We Our You Your It Its I My A An In On At By For From
    With Without To But And Or Nor Yet So If When While Where Who What Why How After Before Since Until Because As
    Although Though However Moreover Thus Then Now Here No Not All Many Most Some Such Each Every Both One Let"""
)


def sentence_ends(text: str, start: int, stop: int) -> Iterator[int]:
    """Yield the ends of the sentences of text[start:stop], ascending, each just after its closing punctuation.

    Line breaks count as spaces. The end of the range is yielded only when punctuation stands there.
    """
    begin = start
    for match in _END.finditer(text, start, stop):
        # The lookahead does not see past `stop`, so an end at the very end of the range is found here.
        if match.end() > begin and _is_end(text, begin, match, stop):
            begin = match.end()
            yield begin
            if direction := _STAGE_DIRECTION.match(text, begin, stop):
                begin = direction.end()
                yield begin
    if begin < stop and _closes(text, begin, stop):
        yield stop


def _closes(text: str, start: int, stop: int) -> bool:
    tail = text[max(start, stop - 8) : stop].rstrip("\"'”’»)]*_」』）")
    return tail.endswith((".", "!", "?", "…", "。", "！", "？", "｡", "؟", "۔", "।"))


def ends_as_sentence(text: str, start: int, stop: int) -> bool:
    """Tell whether text[start:stop], stripped, closes with a sentence's punctuation."""
    return _closes(text, start, stop) and not text.endswith((" ...", " …"), start, stop)


def _is_end(text: str, begin: int, match: re.Match[str], stop: int) -> bool:
    after = match.end()
    while after < stop and (text[after].isspace() or text[after] in _OPENING):
        after += 1
    if after >= stop:
        return True
    following = text[after]
    if following.islower():
        return False
    if match[0][0] != "." or (len(match[0]) > 1 and match[0][1] == "."):
        return True
    found = _LAST_WORD.search(text, max(begin, match.start() - 24), match.start())
    word = found[0] if found else ""
    return not _abbreviates(word, text[begin : match.start()] if match.start() - begin < 16 else "", text, after)


def _abbreviates(word: str, sentence: str, text: str, after: int) -> bool:
    """Tell whether the full stop after `word` belongs to it; `sentence` is all before it when that is short."""
    lowered = word.lower()
    if sentence.strip("([\"'“ \t\r\n") == word and (word.isdigit() or _ROMAN.match(word) or len(word) == 1):
        return True  # a list's number, not a sentence of one word
    if lowered in _NEVER_LAST or (lowered in _BEFORE_NUMBER and text[after].isdigit()):
        return True
    if lowered in _BEFORE_ROMAN and _roman_at(text, after):
        return True
    following = _NEXT_WORD.match(text, after)
    starts_anew = following is not None and following[0] in _STARTERS and not text.startswith(".", following.end())
    if lowered in _SOMETIMES_LAST or _INITIALS.match(word):
        return not starts_anew
    return len(word) == 1 and word.isalpha() and word.isupper() and not starts_anew


def _roman_at(text: str, position: int) -> bool:
    following = _NEXT_WORD.match(text, position)
    return following is not None and following[0].isupper() and _ROMAN.match(following[0]) is not None
