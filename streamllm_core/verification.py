"""Which drafted tokens an answer keeps: those that the model would have chosen itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from streamllm_core.request import Request
from streamllm_core.sampling import choose


@dataclass(frozen=True)
class Turn:
    """A request gains tokens: ``hidden`` [1 + drafts, hidden] of the stream's last token and of each drafted one."""

    request: Request
    drafts: Sequence[int]
    hidden: Tensor

    @classmethod
    def plain(cls, request: Request) -> Turn:
        """Without drafts."""
        assert request.stream.last_hidden is not None
        return cls(request, (), request.stream.last_hidden[None])

    def accept(self, choice: Callable[[int], int]) -> int:
        """Give the request the model's choice behind each token, as long as the drafts agree with it; how many did.

        ``choice(row)``: what follows the token of that row of ``hidden``. The stream keeps the drafts that agreed.
        """
        request, kept = self.request, 0
        for kept, draft in enumerate((*self.drafts, None)):
            token = choice(kept)
            request.accept(token)
            if request.finish_reason or token != draft:
                break
        if self.drafts:
            request.stream.keep(kept, self.hidden[kept])
        return kept

    def drawn(self, logits: Sequence[Tensor]) -> Callable[[int], int]:
        """A choice by sampling from the rows of ``logits``. It draws the same numbers as without drafts, so that it
        chooses the same, too."""
        return lambda row: choose(logits[row], self.request.sampling, len(self.request.generated))


def head_batches(turns: Sequence[Turn], rows: int) -> Iterator[list[Turn]]:
    """Turns that go through the head together, at most ``rows`` rows (or a single turn)."""
    batch: list[Turn] = []
    used = 0
    for turn in turns:
        if batch and used + len(turn.hidden) > rows:
            yield batch
            batch, used = [], 0
        batch.append(turn)
        used += len(turn.hidden)
    if batch:
        yield batch
