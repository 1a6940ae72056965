"""Sentences that stand for a document, chosen by what reading computes anyway: nothing is generated, so nothing can
be made up.

A sentence is the mean of its tokens' hidden states at two thirds of the depth, where a decoder's states carry the
most meaning; the vectors are centred on the document and compared by cosine. A sentence is central when its nearest
neighbours in its third of the document are near (LexRank, Erkan and Radev 2004, with nearest neighbours for the
graph), and is taken unless it resembles one taken before (maximal marginal relevance, Carbonell and Goldstein 1998).
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.segments import Segment
from pipeline.tasks.commands import Note
from pipeline.tasks.worth import BARRED, fold, reluctance

_NEIGHBOURS = 8
_REDUNDANT = 0.6  # the cosine from which on two sentences say the same
_LIKENESS_PRICE = 0.3  # what a cosine of 1 with a sentence already taken costs
_HELD = 512  # sentences; when there are more, the better half of each region stays
_REGIONS = 16  # equal stretches of what has been read
_REMEMBERED = 50_000  # different sentences of which repetitions are counted
_PER_THIRD = ((20, 1), (100, 2))  # up to so many sentences, so many highlights a third
_MOST_PER_THIRD = 3
_LEAD = " \t\r\n-–—•*"  # stands before a list's item or an aside, and is no part of it
_LAST_RESORT = 320  # characters of a text that has no sentence at all


@dataclass(frozen=True)
class _Sentence:
    note: Note
    key: int
    reluctance: float
    vector: NDArray[np.float16]


class HighlightPool:
    """Takes in a document's sentences as it is read; holds a bounded number of them, from all its parts alike."""

    def __init__(self) -> None:
        self._held: list[_Sentence] = []
        self._sum: NDArray[np.float64] | None = None
        self._count = 0
        self._seen: Counter[int] = Counter()
        self._opening: Note | None = None

    def add(self, segment: Segment, vectors: NDArray[np.float32]) -> None:
        """Takes in a segment and its sentences' vectors `[sentences, hidden]`."""
        if self._opening is None:
            self._opening = _opening(segment)
        for (start, stop), vector in zip(segment.sentences, vectors, strict=True):
            start = stop - len(segment.text[start:stop].lstrip(_LEAD))
            text = segment.text[start:stop]
            key = hash(fold(text))
            if key in self._seen or len(self._seen) < _REMEMBERED:
                self._seen[key] += 1
            note = Note(segment.locate(start), segment.locate(stop), text)
            self._held.append(_Sentence(note, key, reluctance(text), vector.astype(np.float16)))
        if len(vectors):
            total = vectors.sum(axis=0, dtype=np.float64)
            self._sum = total if self._sum is None else self._sum + total
            self._count += len(vectors)
        if len(self._held) > _HELD:
            self._condense()

    def best(self) -> list[Note]:
        """The highlights, in the order of the text: one to three from each third of the document."""
        shown = self._showable()
        if not shown:  # nothing but fragments: the least bad one, or the text's first words
            least = min(self._held, key=lambda each: each.reluctance, default=None)
            return [least.note] if least else [self._opening] if self._opening else []
        vectors = self._unit(shown)
        quota = next((count for most, count in _PER_THIRD if self._count <= most), _MOST_PER_THIRD)
        chosen: list[int] = []
        for part in _stretches(shown, 3):
            candidates = self._candidates(shown, part)
            scores = _scores(shown, vectors, candidates)
            for _ in range(quota):
                likeness = (vectors[candidates] @ vectors[chosen].T).max(axis=1, initial=0.0)
                merits = np.where(likeness < _REDUNDANT, scores - _LIKENESS_PRICE * likeness, -np.inf)
                if (merits > -np.inf).any():
                    chosen.append(candidates[int(merits.argmax())])
        return [shown[index].note for index in sorted(chosen)]

    def _showable(self) -> list[_Sentence]:
        return [each for each in self._held if each.reluctance < BARRED]

    def _candidates(self, sentences: list[_Sentence], part: list[int]) -> list[int]:
        """Those of `part` that occur once in the document; where all are repetitions, the one repeated least."""
        unique = [index for index in part if self._seen[sentences[index].key] <= 1]
        if unique:
            return unique
        return [min(part, key=lambda index: (self._seen[sentences[index].key], sentences[index].reluctance))]

    def _unit(self, sentences: list[_Sentence]) -> NDArray[np.float32]:
        """Their vectors, centred on the mean of all sentences seen and of length one."""
        assert self._sum is not None
        vectors = np.stack([each.vector for each in sentences]).astype(np.float32)
        vectors -= (self._sum / self._count).astype(np.float32)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: NDArray[np.float32] = vectors / np.maximum(norms, 1e-12)
        return unit

    def _condense(self) -> None:
        """Keeps the most central sentences of each region alike, so that no part of a long document is crowded out."""
        shown = self._showable() or self._held[:1]
        vectors = self._unit(shown)
        kept: list[int] = []
        for part in _stretches(shown, _REGIONS):
            candidates = self._candidates(shown, part)
            best = np.argsort(-_scores(shown, vectors, candidates), kind="stable")[: _HELD // 2 // _REGIONS]
            kept += sorted(candidates[place] for place in best)
        self._held = [shown[index] for index in kept]


def _stretches(sentences: list[_Sentence], count: int) -> list[list[int]]:
    """Indices of the sentences in each of `count` equal stretches of the source; empty stretches left out."""
    end = sentences[-1].note.end
    parts: list[list[int]] = [[] for _ in range(count)]
    for index, each in enumerate(sentences):
        parts[min(count - 1, each.note.start * count // max(1, end))].append(index)
    return [part for part in parts if part]


def _scores(sentences: list[_Sentence], vectors: NDArray[np.float32], candidates: list[int]) -> NDArray[np.float32]:
    reluctances = np.array([sentences[index].reluctance for index in candidates], np.float32)
    scores: NDArray[np.float32] = _centrality(vectors[candidates]) - reluctances
    return scores


def _centrality(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Mean cosine of each vector (of length one) with its nearest others."""
    near = vectors @ vectors.T
    np.fill_diagonal(near, -1.0)
    count = min(_NEIGHBOURS, len(vectors) - 1)
    if count == 0:
        return np.zeros(len(vectors), np.float32)
    nearest = np.partition(near, len(vectors) - count, axis=1)[:, -count:]
    mean: NDArray[np.float32] = nearest.mean(axis=1)
    return mean


def _opening(segment: Segment) -> Note:
    start = len(segment.text) - len(segment.text.lstrip())
    text = segment.text[start : start + _LAST_RESORT].rstrip()
    return Note(segment.locate(start), segment.locate(start + len(text)), text)
