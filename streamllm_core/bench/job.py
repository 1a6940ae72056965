"""A whole job on random weights: documents are read, each is answered, as many in flight as the plan has streams."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from streamllm_core.bench.limits import ComputeLimit, link_bandwidth
from streamllm_core.bench.shapes import Shape
from streamllm_core.engine import Engine
from streamllm_core.engine_config import EngineConfig
from streamllm_core.kv_storage import KVDtype
from streamllm_core.model import StreamingModel
from streamllm_core.request import Request

SINKS = 4


@dataclass(frozen=True)
class Work:
    """``documents`` of so many tokens each, answered with so many."""

    documents: int
    document_tokens: int
    answer_tokens: int

    @property
    def tokens(self) -> int:
        """Through the layers; an answer's last token does not go through them again."""
        return self.documents * (self.document_tokens + self.answer_tokens - 1)

    def config(self, window: int, kv_dtype: KVDtype) -> EngineConfig:
        """The engine for this work."""
        return EngineConfig(
            window,
            sinks=SINKS,
            excursion=0,
            streams=self.documents,
            draft_tokens=0,
            kv_dtype=kv_dtype,
            read_tokens=self.document_tokens,
            answer_tokens=self.answer_tokens,
        )


@dataclass(frozen=True)
class JobTime:
    """Seconds and bytes of a job. ``roofline``: the sum over its passes of max(transfer, compute)."""

    seconds: float
    roofline: float
    passes: int
    tokens: int
    streams: int
    pass_tokens: int
    resident_layers: int
    bytes_moved: int
    predicted_tokens_per_second: float
    peak_bytes: int
    plan_bytes: int
    budget: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def bench_job(model: StreamingModel, shape: Shape, config: EngineConfig, work: Work) -> JobTime:
    """Run ``work`` on an engine of ``config``, then measure the limits of its passes."""
    on_card = model.device.type == "cuda"
    if on_card:
        torch.cuda.reset_peak_memory_stats(model.device)
    engine = model.engine(config)
    # Kernels are compiled and libraries loaded, for windows that are not full and such that are.
    _run(engine, Work(min(2, engine.streams), config.window + engine.chunk_tokens, 3))
    passes, moved = engine.passes, model.bytes_moved
    start = time.perf_counter()
    sizes = _run(engine, work)
    seconds = time.perf_counter() - start
    passes, moved = engine.passes - passes, model.bytes_moved - moved
    peak = 0
    if on_card:
        peak = torch.cuda.max_memory_allocated(model.device)
        torch.cuda.set_per_process_memory_fraction(1.0, model.device)  # the limits are measured outside the budget
    plan = engine.plan
    bandwidth = link_bandwidth(model) if model.streamer.order else float("inf")
    del engine
    return JobTime(
        seconds=seconds,
        roofline=_roofline(model, shape, config.window, sizes, bandwidth),
        passes=passes,
        tokens=work.tokens,
        streams=plan.batching.streams,
        pass_tokens=plan.batching.pass_tokens,
        resident_layers=len(plan.resident),
        bytes_moved=moved,
        predicted_tokens_per_second=plan.prediction.job,
        peak_bytes=peak,
        plan_bytes=plan.total,
        budget=plan.budget,
    )


def _run(engine: Engine, work: Work) -> list[tuple[int, bool]]:
    """The number of tokens of each pass, and whether it generated any."""
    vocabulary = engine.model.config.vocab_size
    waiting = work.documents
    sizes = []
    while waiting or engine.busy:
        while waiting and engine.free_streams:
            text = torch.randint(vocabulary, (work.document_tokens,)).tolist()
            engine.submit(Request(engine.open(sinks=SINKS), text, max_new_tokens=work.answer_tokens))
            waiting -= 1
        read, generated = engine.tokens_read, engine.tokens_generated
        for request in engine.step():
            engine.close(request.stream)
        if engine.tokens_read > read:
            sizes.append((engine.tokens_read - read, engine.tokens_generated > generated))
    return sizes


def _roofline(
    model: StreamingModel, shape: Shape, window: int, passes: Sequence[tuple[int, bool]], bandwidth: float
) -> float:
    place = model.plan.placement
    limit = ComputeLimit(shape, window, model.dtype, model.device)
    grid = [2**exponent for exponent in range(6, 16)]
    seconds = 0.0
    for tokens, generates in passes:
        moved = place.bytes_per_pass if generates else place.layer_bytes_per_pass
        seconds += max(moved / bandwidth, limit.at(tokens, grid, chunk=512))
    return seconds


def table(job: JobTime, work: Work) -> str:
    """The job for people."""
    lines = {
        "documents x tokens + answer": f"{work.documents} x {work.document_tokens:,} + {work.answer_tokens}",
        "streams, tokens a pass": f"{job.streams}, {job.pass_tokens:,}",
        "resident layers": str(job.resident_layers),
        "passes, tokens in the mean one": f"{job.passes:,}, {job.tokens / job.passes:,.0f}",
        "time": f"{job.seconds:.2f} s; roofline {job.roofline:.2f} s, roofline / time {job.roofline / job.seconds:.3f}",
        "tokens a second": f"{job.tokens_per_second:,.0f}; predicted {job.predicted_tokens_per_second:,.0f}",
        "over the link": f"{job.bytes_moved / 1e9:.1f} GB, {job.bytes_moved / job.seconds / 1e9:.1f} GB/s",
    }
    if job.peak_bytes:
        lines["memory"] = (
            f"peak {job.peak_bytes / 1e9:.2f} GB / plan {job.plan_bytes / 1e9:.2f} GB = "
            f"{job.peak_bytes / job.plan_bytes:.3f}; plan / budget {job.plan_bytes / job.budget:.3f}"
        )
    return "\n".join(f"{name:<34}{value}" for name, value in lines.items())


def as_json(job: JobTime, work: Work) -> str:
    return json.dumps(asdict(work) | asdict(job) | {"tokens_per_second": job.tokens_per_second})
