"""The ids of a stream's recent tokens, from which what follows can be guessed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class History:
    """A ring of token ids beside those of the keys, and as long as the longest of them: constant size, and a stream
    that goes back to an earlier length finds there what it had."""

    def __init__(self, visible: int = 0, headroom: int = 0) -> None:
        """``visible``: how many tokens are shown; so many, less what was written ahead, are kept."""
        self._visible = visible
        self._ids = np.zeros(visible + headroom, np.int32)

    def write(self, start: int, tokens: Sequence[int]) -> None:
        """``tokens`` stand at the stream's positions ``start`` …"""
        if len(tokens) == 1:  # decoding; ten times as fast
            self._ids[start % len(self._ids)] = tokens[0]
            return
        kept = tokens[-len(self._ids) :]
        first = start + len(tokens) - len(kept)
        self._ids[np.arange(first, first + len(kept)) % len(self._ids)] = kept

    def last(self, length: int) -> NDArray[np.int32]:
        """The ids of a stream of ``length`` tokens, oldest first, at most ``visible`` (perhaps not a copy)."""
        count = min(length, self._visible)
        if count == 0:
            return self._ids[:0]
        begin, end = (length - count) % len(self._ids), (length - 1) % len(self._ids) + 1
        return self._ids[begin:end] if begin < end else np.concatenate([self._ids[begin:], self._ids[:end]])

    def copy(self) -> History:
        twin = History()
        twin._visible, twin._ids = self._visible, self._ids.copy()
        return twin
