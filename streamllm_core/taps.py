"""Hidden states that reading computes anyway, averaged over spans of the text."""

from __future__ import annotations

import torch
from torch import Tensor

from streamllm_core.request import Request
from streamllm_core.scheduler import Work


class Tap:
    """Adds the hidden states of a pass up to the spans that its requests asked for."""

    def __init__(self, works: list[Work]) -> None:
        self.rows: list[int] = []
        self._sums: list[tuple[Request, int, int]] = []  # request, span, number of rows
        first = 0
        for work in works:
            fed, request = work.request.fed, work.request
            for span, (start, stop) in enumerate(request.spans):
                inside = range(max(start, fed), min(stop, fed + len(work.tokens)))
                if inside:
                    self.rows.extend(first - fed + token for token in inside)
                    self._sums.append((request, span, len(inside)))
            first += len(work.tokens)

    def collect(self, tapped: Tensor | None) -> None:
        """``tapped``: [len(rows), hidden]."""
        if not self.rows:
            return
        assert tapped is not None
        owners = torch.tensor([count for _, _, count in self._sums], device=tapped.device)
        index = torch.arange(len(owners), device=tapped.device).repeat_interleave(owners)
        sums = torch.zeros(len(owners), tapped.shape[1], device=tapped.device).index_add_(0, index, tapped.float())
        for (request, span, _), total in zip(self._sums, sums.cpu(), strict=True):
            assert request.span_states is not None
            start, stop = request.spans[span]
            request.span_states[span] += total / (stop - start)
