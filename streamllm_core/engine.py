"""Engine: many streams, packed passes. Open a stream, submit requests, step until they are finished."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from streamllm_core.architectures import head_shape, layer_geometries
from streamllm_core.cache import RollingCache, Stream
from streamllm_core.drafting import DEFAULT_DRAFTS, Drafter, NgramDrafter, adapted
from streamllm_core.engine_config import EngineConfig
from streamllm_core.errors import WindowError
from streamllm_core.layout import Run, micro_batches
from streamllm_core.memory.budget import KVCacheSizingManager
from streamllm_core.memory.limits import UNLIMITED
from streamllm_core.request import Request
from streamllm_core.rotary import Rotary
from streamllm_core.scheduler import Work, add_drafts, plan_pass
from streamllm_core.taps import Tap
from streamllm_core.verification import Turn, head_batches

if TYPE_CHECKING:
    from streamllm_core.model import StreamingModel


class Engine:
    """Runs requests of many streams through a model in shared passes.

    Counters: ``passes`` over the weights, ``tokens_read`` (drafted ones only when they were kept),
    ``tokens_generated``, ``tokens_drafted``, ``tokens_accepted`` (drafted and kept), ``seconds`` in ``step``.

    ``drafter`` guesses tokens ahead: an NgramDrafter unless replaced.
    """

    def __init__(
        self, model: StreamingModel, config: EngineConfig, manager: KVCacheSizingManager | None = None
    ) -> None:
        """``manager`` knows the budget; None sets no limit. Raises WindowError when S + R + 1 exceeds the context that
        the model was trained for, BudgetError when not even one stream fits."""
        span = config.sinks + config.window + 1
        if span > model.trained_context:
            raise WindowError(
                f"sinks + window + 1 = {config.sinks} + {config.window} + 1 = {span} tokens, but {model.name} was "
                f"trained for {model.trained_context}; use a window of at most "
                f"{model.trained_context - config.sinks - 1}."
            )
        self.model = model
        self.config = config
        manager = manager or KVCacheSizingManager(UNLIMITED, model.manager.rates)
        wanted = model.demand(config)
        self.plan = manager.batch(model.plan.placement, wanted)
        batching = self.plan.batching
        self.pass_tokens = batching.pass_tokens
        self.micro_tokens = batching.micro_tokens
        self.chunk_tokens = batching.chunk_tokens
        self.stream_bytes = batching.stream_bytes
        automatic = DEFAULT_DRAFTS if model.streamer.order else 0
        self.draft_tokens = automatic if config.draft_tokens is None else config.draft_tokens
        self.drafter: Drafter = NgramDrafter()
        geometries = layer_geometries(model.config, config.window)
        _, kv_heads, head_dim = head_shape(model.config)
        self.cache = RollingCache(
            geometries,
            slots=batching.streams,
            max_sinks=config.sinks,
            headroom=max(batching.chunk_tokens, wanted.excursion),
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=model.dtype,
            device=model.device,
            kv_dtype=config.kv_dtype,
        )
        self.rotary = Rotary(model.rotary_module, span, [g.layer_type for g in geometries])
        self.passes = self.tokens_read = self.tokens_generated = self.tokens_drafted = self.tokens_accepted = 0
        self.seconds = 0.0
        self._requests: list[Request] = []
        self._pins: dict[tuple[int, ...], dict[str, Tensor]] = {}

    # --- streams ---------------------------------------------------------------------------------------------

    @property
    def free_streams(self) -> int:
        return self.cache.free_slots

    @property
    def requests(self) -> Sequence[Request]:
        """Those that are not finished, in the order submitted."""
        return tuple(self._requests)

    @property
    def streams(self) -> int:
        return self.cache.slots

    def open(self, pin: Sequence[int] = (), *, sinks: int | None = None) -> Stream:
        """A new stream that begins with ``pin``, whose tokens are never evicted.

        A pin is computed once and then copied. ``sinks`` pins the first tokens that will be read instead. Raises
        NoFreeStream, WindowError.
        """
        key = tuple(pin)
        if not key:
            return self.cache.open(sinks or 0)
        if key in self._pins:
            return self.cache.restore(self._pins[key])
        stream = self.cache.open(len(key))
        for start in range(0, len(key), self.pass_tokens):
            self.forward([(stream, key[start : start + self.pass_tokens])])
        self._pins[key] = self.cache.snapshot(stream)
        return stream

    def fork(self, stream: Stream) -> Stream:
        """A copy of ``stream`` that goes its own way. Raises NoFreeStream."""
        return self.cache.fork(stream)

    def close(self, stream: Stream) -> None:
        """Free the slot; a request still running on the stream is dropped."""
        self._requests = [request for request in self._requests if request.stream is not stream]
        self.drafter.forget(stream)
        self.cache.close(stream)

    def evict(self, stream: Stream, start: int, stop: int) -> None:
        """Hide the stream's tokens [start, stop) from all later ones."""
        self.cache.evict(stream, start, stop)

    def snapshot(self, stream: Stream) -> dict[str, Tensor]:
        """The stream as named CPU tensors of constant size, for safetensors."""
        return self.cache.snapshot(stream)

    def restore(self, tensors: dict[str, Tensor]) -> Stream:
        """The stream of a snapshot; later logits are bit-identical."""
        return self.cache.restore(tensors)

    # --- requests --------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    @property
    def tokens_per_turn(self) -> float:
        """How many tokens a stream gains in a pass that generates for it: 1 without drafts."""
        return self.tokens_generated / max(1, self.tokens_generated - self.tokens_accepted)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError when its stream is closed or has one already, or there is nothing to do,
        WindowError when the excursion is longer than planned for."""
        self.cache.reserve([(request.stream, ())])
        if any(other.stream is request.stream for other in self._requests):
            raise ValueError("this stream has a request that is not finished")
        if not request.tokens and request.stream.last_hidden is None:
            raise ValueError("an empty stream needs tokens to begin with")
        if not request.tokens and not request.max_new_tokens:
            raise ValueError("a request needs tokens to read or to generate")
        if request.excursion:
            longest = len(request.tokens) + max(request.max_new_tokens - 1, 0)
            if longest > self.cache.headroom:
                raise WindowError(
                    f"an excursion of {longest} tokens exceeds the {self.cache.headroom} planned for; "
                    "raise EngineConfig.excursion."
                )
            request.mark = request.stream.mark()
        if request.spans:
            request.span_states = torch.zeros(len(request.spans), self.model.config.hidden_size)
        request.most_drafts = self.draft_tokens
        self._requests.append(request)

    def step(self) -> list[Request]:
        """Run one pass over the weights; the requests that it finished, in the order submitted."""
        began = time.perf_counter()
        finished = self._step()
        self.seconds += time.perf_counter() - began
        return finished

    def _step(self) -> list[Request]:
        works = self._plan()
        drafted: dict[Request, Turn] = {}
        if works:
            before = [work.request.stream.last_hidden for work in works]
            tap = Tap(works)
            pieces = [(work.request.stream, work.tokens) for work in works]
            hidden = self.forward(pieces, tap.rows, [work.drafts for work in works])
            tap.collect(self.model.state.tapped)
            parts = hidden.split([len(work.tokens) for work in works])
            for work, last, rows in zip(works, before, parts, strict=True):
                if work.request.score and not work.request.decoding:
                    self._score(work, last, rows)
                if work.drafts:
                    drafted[work.request] = Turn(work.request, work.tokens[1:], rows)
                work.request.absorb(work.tokens)
                self.tokens_read += len(work.tokens) - work.drafts
        ready = [request for request in self._requests if request.fed == len(request.tokens)]
        self._generate([drafted.get(request) or Turn.plain(request) for request in ready])
        finished = [request for request in self._requests if request.finish_reason]
        self._requests = [request for request in self._requests if not request.finish_reason]
        for request in finished:
            if request.mark is not None:
                request.stream.rewind(request.mark)
        return finished

    def _plan(self) -> list[Work]:
        works = plan_pass(self._requests, self.pass_tokens, self.chunk_tokens)
        most = [
            min(work.request.acceptable, self.cache.room(work.request.stream) - 1) if work.request.decoding else 0
            for work in works
        ]
        return add_drafts(works, most, self.pass_tokens, self.drafter)

    @torch.inference_mode()
    def forward(
        self,
        pieces: Sequence[tuple[Stream, Sequence[int]]],
        tap_rows: Sequence[int] = (),
        drafts: Sequence[int] = (),
    ) -> Tensor:
        """One packed pass: append tokens to streams, each stream once. Returns [tokens, hidden] behind the final norm.

        ``tap_rows``: rows whose hidden states at two thirds of the depth are kept in ``model.state.tapped``.
        ``drafts``: how many of each piece's last tokens lie beyond the stream's length until ``Stream.keep`` says that
        they are part of it; none when left out.
        """
        self.cache.reserve(pieces)
        runs = [Run(stream.slot, 0, len(ids), stream.length, stream.sinks, stream.holes) for stream, ids in pieces]
        state = self.model.state
        state.cache, state.rotary = self.cache, self.rotary
        state.batches = micro_batches(runs, self.micro_tokens, self.model.device, self.chunk_tokens)
        order = [row for batch in state.batches for rows in batch.taken for row in rows]
        back = torch.tensor(order).argsort()  # where the pass's tokens went
        state.tap_rows = back[list(tap_rows)].to(self.model.device) if tap_rows else None
        asked = [token for _, tokens in pieces for token in tokens]
        hidden = self.model.forward([asked[row] for row in order])
        if len(state.batches) > 1:
            hidden = hidden[back.to(hidden.device)]
        self.passes += 1
        end = 0
        for (stream, tokens), ahead in zip(pieces, drafts or [0] * len(pieces), strict=True):
            end += len(tokens)
            stream.history.write(stream.length, tokens)
            stream.keep(len(tokens) - ahead, hidden[end - 1 - ahead])
        return hidden

    @torch.inference_mode()
    def _score(self, work: Work, last: Tensor | None, rows: Tensor) -> None:
        tokens, context = list(work.tokens), rows[:-1]
        if last is None:
            tokens = tokens[1:]
        else:
            context = torch.cat([last[None], context])
        for start in range(0, len(tokens), self.model.sizes.logit_rows):
            part = torch.tensor(tokens[start : start + self.model.sizes.logit_rows], device=rows.device)
            logits = self.model.head(context[start : start + self.model.sizes.logit_rows])
            chosen = logits.gather(1, part[:, None])[:, 0] - logits.logsumexp(-1)
            work.request.logprobs.extend(chosen.tolist())

    @torch.inference_mode()
    def _generate(self, turns: list[Turn]) -> None:
        """Give each request its next tokens, or finish it."""
        wanting = [turn for turn in turns if turn.request.max_new_tokens]
        greedy = [turn for turn in wanting if not turn.request.sampling.temperature]
        if greedy:
            best = iter(self.model.best(torch.cat([turn.hidden for turn in greedy])).tolist())
            for turn in greedy:
                tokens = list(islice(best, len(turn.hidden)))
                self._count(turn, turn.accept(tokens.__getitem__))
        sampled = [turn for turn in wanting if turn.request.sampling.temperature]
        for batch in head_batches(sampled, self.model.sizes.logit_rows):
            rows = iter(self.model.head(torch.cat([turn.hidden for turn in batch])))
            for turn in batch:
                self._count(turn, turn.accept(turn.drawn(list(islice(rows, len(turn.hidden))))))
        for turn in turns:
            if not turn.request.max_new_tokens:
                turn.request.finish_reason = "length"

    def _count(self, turn: Turn, kept: int) -> None:
        self.tokens_generated += kept + 1
        self.tokens_read += kept
        self.tokens_drafted += len(turn.drafts)
        self.tokens_accepted += kept
        if turn.drafts:
            limit = turn.request.most_drafts
            turn.request.most_drafts = adapted(limit, len(turn.drafts), kept, self.draft_tokens)
