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


def plan_pass(requests: Sequence[Request], budget: int) -> list[Work]:
    """All decode tokens first, then prefill chunks, oldest request first, up to ``budget`` tokens in all.

    Decode tokens stand in the order of their slots, so that attention reads neighbouring slots as one block. When
    decode tokens alone fill the budget, the oldest prefill still gets one token: no document starves.
    """
    decoding = [Work(request, (request.pending,)) for request in requests if request.pending is not None]
    decoding.sort(key=lambda work: work.request.stream.slot)
    room = max(budget - len(decoding), 1)
    reading: list[Work] = []
    for request in requests:
        if request.decoding or request.fed == len(request.tokens) or room == 0:
            continue
        tokens = request.tokens[request.fed : request.fed + room]
        reading.append(Work(request, tokens))
        room -= len(tokens)
    return decoding + reading
