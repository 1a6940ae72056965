"""Which tokens go into the next pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from streamllm_core.drafting import Drafter
from streamllm_core.request import Request


@dataclass(frozen=True)
class Work:
    """Tokens of one request that go through the next pass; the last ``drafts`` of them are guesses."""

    request: Request
    tokens: Sequence[int]
    drafts: int = 0


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


def add_drafts(works: Sequence[Work], most: Sequence[int], budget: int, drafter: Drafter) -> list[Work]:
    """Let decode tokens be followed by up to ``most`` drafted ones each, where ``budget`` leaves room for them.

    Reading comes first: its tokens are certain to be of use. When not all drafts fit, the longest are cut.
    """
    room = budget - sum(len(work.tokens) for work in works)
    takers = [index for index, count in enumerate(most) if count > 0]
    if room <= 0 or not takers:
        return list(works)
    requests, counts = [works[index].request for index in takers], [most[index] for index in takers]
    proposals = drafter.propose(requests, counts)
    drafts = [
        tuple(_until_stop(request, proposal[:count]))
        for request, proposal, count in zip(requests, proposals, counts, strict=True)
    ]
    level = max(map(len, drafts))
    while sum(min(len(draft), level) for draft in drafts) > room:
        level -= 1
    drafted = list(works)
    for index, draft in zip(takers, drafts, strict=True):
        kept = draft[:level]
        drafted[index] = replace(works[index], tokens=(*works[index].tokens, *kept), drafts=len(kept))
    return drafted


def _until_stop(request: Request, proposal: Sequence[int]) -> Iterator[int]:
    """Nothing can stand behind the end of an answer."""
    return takewhile(lambda token: token not in request.stop, proposal)
