"""A plan put to the test: passes as full as it says, their speed beside the prediction, their peak beside the plan."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from streamllm_core.bench.limits import link_bandwidth
from streamllm_core.bench.passes import LONG_AGO
from streamllm_core.engine import Engine
from streamllm_core.engine_config import EngineConfig
from streamllm_core.kv_storage import KVDtype
from streamllm_core.model import StreamingModel
from streamllm_core.request import Request

PREFILL_PASSES = 4
DECODE_PASSES = 12
ENDLESS = 10_000  # tokens of an answer: no stream falls silent while others still read
SINKS = 4


@dataclass(frozen=True)
class PlanCheck:
    """Bytes, and tokens a second. ``transfer``: seconds that a generating pass's bytes take on the link alone."""

    budget: int
    plan: int
    peak: int
    resident_layers: int
    streams: int
    pass_tokens: int
    predicted_prefill: float
    prefill: float
    predicted_decode: float
    decode: float
    transfer: float

    @property
    def decode_pass(self) -> float:
        """Seconds of a pass that generates a token for each stream."""
        return self.streams / self.decode


def config(window: int, kv_dtype: KVDtype) -> EngineConfig:
    """The engine that is checked: nothing is drafted, so that a pass generates one token for each stream."""
    return EngineConfig(window, SINKS, excursion=0, draft_tokens=0, kv_dtype=kv_dtype)


def check(model: StreamingModel, wanted: EngineConfig) -> PlanCheck:
    """Fill every stream and every pass: first reading, then generating."""
    on_card = model.device.type == "cuda"
    if on_card:
        torch.cuda.reset_peak_memory_stats(model.device)
    engine = model.engine(wanted)
    plan = engine.plan
    batching = plan.batching
    each = -(-batching.pass_tokens * (PREFILL_PASSES + 2) // batching.streams)
    for _ in range(batching.streams):
        text = torch.randint(model.config.vocab_size, (each,)).tolist()
        stream = engine.open(sinks=SINKS)
        stream.length = stream.reach = LONG_AGO  # the window is full
        engine.submit(Request(stream, text, max_new_tokens=ENDLESS))
    engine.step()  # kernels are compiled, libraries loaded
    prefill = _speed(engine, lambda engine: engine.tokens_read, PREFILL_PASSES)
    while any(request.pending is None for request in engine.requests):
        engine.step()
    engine.step()
    decode = _speed(engine, lambda engine: engine.tokens_generated, DECODE_PASSES)
    peak = 0
    if on_card:
        peak = torch.cuda.max_memory_allocated(model.device)
    moved = plan.placement.bytes_per_pass if model.streamer.order else 0
    return PlanCheck(
        budget=plan.budget,
        plan=plan.total,
        peak=peak,
        resident_layers=len(plan.resident),
        streams=batching.streams,
        pass_tokens=batching.pass_tokens,
        predicted_prefill=plan.prediction.prefill,
        prefill=prefill,
        predicted_decode=plan.prediction.decode,
        decode=decode,
        transfer=moved / link_bandwidth(model) if moved else 0.0,
    )


def _speed(engine: Engine, count: Callable[[Engine], int], passes: int) -> float:
    before, start = count(engine), time.perf_counter()
    for _ in range(passes):
        engine.step()
    if engine.model.device.type == "cuda":
        torch.cuda.current_stream(engine.model.device).synchronize()
    return (count(engine) - before) / (time.perf_counter() - start)


def table(result: PlanCheck) -> str:
    """The check for people."""
    lines = {
        "streams, tokens a pass": f"{result.streams}, {result.pass_tokens:,}",
        "resident layers": str(result.resident_layers),
        "reading": f"{result.prefill:,.0f} tokens/s, predicted {result.predicted_prefill:,.0f}: "
        f"{result.prefill / result.predicted_prefill:.3f}",
        "generating": f"{result.decode:,.0f} tokens/s, predicted {result.predicted_decode:,.0f}: "
        f"{result.decode / result.predicted_decode:.3f}",
        "plan / budget": f"{result.plan / 1e9:.2f} / {result.budget / 1e9:.2f} GB = {result.plan / result.budget:.3f}",
    }
    if result.transfer:
        lines["generating pass / transfer"] = (
            f"{1e3 * result.decode_pass:.1f} / {1e3 * result.transfer:.1f} ms = "
            f"{result.decode_pass / result.transfer:.3f}"
        )
    if result.peak:
        lines["peak / plan"] = f"{result.peak / 1e9:.2f} / {result.plan / 1e9:.2f} GB = {result.peak / result.plan:.3f}"
    return "\n".join(f"{name:<28}{value}" for name, value in lines.items())


def as_json(result: PlanCheck) -> str:
    return json.dumps(asdict(result))
