"""Which tokens go into the next pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamllm_core.request import Request


@dataclass(frozen=True)
class Work:
    """Tokens of one request that go through the next pass."""

    request: Request
    tokens: Sequence[int]


def plan_pass(requests: Sequence[Request], budget: int, chunk: int) -> list[Work]:
    """All decode tokens first, then prefill, up to ``budget`` tokens in all.

    Prefill is dealt out oldest request first, ``chunk`` tokens at a time: pieces of many streams go through a layer
    together, and only one that is alone takes more. Decode tokens stand in the order of their slots, so that attention
    reads neighbouring slots as one block. When decode tokens alone fill the budget, the oldest prefill still gets one
    token: no document starves.
    """
    decoding = [Work(request, (request.pending,)) for request in requests if request.pending is not None]
    decoding.sort(key=lambda work: work.request.stream.slot)
    reading = [request for request in requests if not request.decoding and request.fed < len(request.tokens)]
    shares = _shares([len(request.tokens) - request.fed for request in reading], max(budget - len(decoding), 1), chunk)
    works = [
        Work(request, request.tokens[request.fed : request.fed + share])
        for request, share in zip(reading, shares, strict=True)
        if share
    ]
    return decoding + works


def _shares(wanted: list[int], room: int, chunk: int) -> list[int]:
    """``room`` tokens dealt out in rounds of at most ``chunk`` each, first come first served."""
    shares = [0] * len(wanted)
    while room and shares != wanted:
        for index, want in enumerate(wanted):
            share = min(chunk, want - shares[index], room)
            shares[index] += share
            room -= share
    return shares
