"""What turns products of queries and keys into the logits of a softmax; the same for every attention kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scoring:
    """``scale`` multiplies the products. With ``softcap`` a score becomes softcap · tanh(score / softcap) (Gemma 2).
    ``s_aux`` [heads]: learned logits that take part in the softmax without a value (GPT-OSS)."""

    scale: float
    softcap: float | None = None
    s_aux: Tensor | None = None
