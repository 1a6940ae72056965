"""Engine: many streams, packed passes. Open a stream, submit requests, step until they are finished."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamllm_core.architectures import head_shape, layer_geometries
from streamllm_core.cache import RollingCache, Stream
from streamllm_core.drafting import DEFAULT_DRAFTS, Drafter, NgramDrafter, adapted
from streamllm_core.errors import WindowError
from streamllm_core.kv_storage import KVDtype
from streamllm_core.layout import Run, micro_batches
from streamllm_core.memory.budget import Demand, KVCacheSizingManager
from streamllm_core.request import Request
from streamllm_core.rotary import Rotary
from streamllm_core.scheduler import Work, add_drafts, plan_pass
from streamllm_core.verification import Turn, head_batches

if TYPE_CHECKING:
    from streamllm_core.model import StreamingModel


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine, in tokens unless said otherwise. None: chosen from the device and the budget.

    window: R, how many tokens before the query stay visible beside the pinned ones.
    sinks: the longest pinned prefix, S.
    excursion: the longest question + answer that is to be rewound.
    streams: texts in flight.
    pass_tokens: how many tokens one pass over the weights takes at most.
    micro_tokens: how many of them go through a layer together; bounds the activation memory.
    kv_dtype: how keys and values are kept: as computed, or in one byte each (twice the streams in the same memory).
    read_tokens, answer_tokens: what a typical text (or a segment with its question) reads and generates; memory is
        shared out accordingly.
    draft_tokens: how many tokens are guessed ahead at most, so that one pass can confirm several; None: 8 when layers
        are streamed (a pass then takes as long for one token as for many), else 0.
    """

    window: int = 2048
    sinks: int = 4
    excursion: int = 512
    streams: int | None = None
    pass_tokens: int | None = None
    micro_tokens: int | None = None
    kv_dtype: KVDtype = "auto"
    read_tokens: int = 1000
    answer_tokens: int = 100
    draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.window < 1 or self.sinks < 0 or self.excursion < 0:
            raise ValueError("window must be at least 1, sinks and excursion at least 0")
        for name in ("streams", "pass_tokens", "micro_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.draft_tokens is not None and self.draft_tokens < 0:
            raise ValueError(f"draft_tokens must be at least 0, not {self.draft_tokens}")


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
            tap = _Tap(works)
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


class _Tap:
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


UNLIMITED = 2**62
# What an engine takes when nothing else is asked for: streams, tokens in a pass, tokens in a layer.
_MOST = {"cpu": (16, 1024, 512), "cuda": (128, 32_768, 4096)}


def demand(config: EngineConfig, model_config: Any, device: torch.device, dtype: torch.dtype) -> Demand:
    """What an engine wants of the memory."""
    streams, pass_tokens, micro_tokens = _MOST[device.type]
    geometries = layer_geometries(model_config, config.window)
    _, kv_heads, head_dim = head_shape(model_config)

    def cache_bytes(headroom: int) -> int:
        return RollingCache.stream_bytes(geometries, config.sinks, headroom, kv_heads, head_dim, dtype, config.kv_dtype)

    drafts = DEFAULT_DRAFTS if config.draft_tokens is None else config.draft_tokens
    return Demand(
        config.window,
        max(config.excursion, 1 + drafts),
        cache_bytes,
        config.streams or streams,
        pass_tokens,
        micro_tokens,
        config.pass_tokens,
        config.micro_tokens,
        config.read_tokens,
        config.answer_tokens,
    )


def within(config: EngineConfig, trained_context: int) -> EngineConfig:
    """``config`` with a window that the model was trained for."""
    return replace(config, window=max(1, min(config.window, trained_context - config.sinks - 1)))
