"""Choosing the next token, reproducibly: the random number of a draw depends on its key alone."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0 is greedy. ``key`` names the draw's owner (document, question …): with ``seed`` and the
    token's number it determines the random number, so results do not depend on what else was in the pass."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    key: tuple[str | int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be at least 0 and finite, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")


GREEDY = Sampling()


def choose(logits: Tensor, sampling: Sampling, number: int) -> int:
    """The token for float32 ``logits`` [vocabulary], the ``number``-th of its answer.

    Nucleus sampling (Holtzman et al. 2020): the smallest set of tokens whose probability reaches ``top_p``.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = (logits.double() - logits.max()) / sampling.temperature  # never +inf, however small the temperature
    probabilities, tokens = torch.softmax(scaled, -1).sort(descending=True, stable=True)
    total = probabilities.cumsum(-1)
    kept = total[(total - probabilities) < sampling.top_p]
    draw = _uniform(sampling, number) * float(kept[-1])
    return int(tokens[min(int(torch.searchsorted(kept, draw, right=True)), len(kept) - 1)])


def _uniform(sampling: Sampling, number: int) -> float:
    """A counter-based random number in [0, 1)."""
    text = repr((sampling.seed, sampling.key, number)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64
