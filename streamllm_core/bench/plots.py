"""Benchmarks as pictures; matplotlib is needed only here (the extra ``plot``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamllm_core.bench.job import JobTime
from streamllm_core.bench.passes import PassTime
from streamllm_core.bench.planned import PlanCheck
from streamllm_core.errors import StreamLLMError


def require() -> None:
    """Raise StreamLLMError, saying what to install, unless plots can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise StreamLLMError("--plot needs matplotlib: pip install 'streamllm-batch[plot]'")


def passes(rows: Sequence[PassTime], path: Path) -> None:
    """Milliseconds a pass over its tokens, beside what bounds it."""
    figure, axes = _figure()
    tokens = [row.tokens for row in rows]
    for name, style in (("sequential", "o-"), ("prefetched", "o-"), ("transfer", "--"), ("compute", "--")):
        axes.plot(tokens, [getattr(row, name) for row in rows], style, label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens a pass", ylabel="milliseconds a pass")
    axes.legend()
    figure.savefig(path)


def job(result: JobTime, path: Path) -> None:
    """A job's time beside its roofline, and its memory beside the plan."""
    figure, axes = _figure(2)
    axes[0].bar(["time", "roofline"], [result.seconds, result.roofline])
    axes[0].set(ylabel="seconds")
    _memory(axes[1], result.peak_bytes, result.plan_bytes, result.budget)
    figure.savefig(path)


def planned(result: PlanCheck, path: Path) -> None:
    """Tokens a second beside their prediction, and memory beside the plan."""
    figure, axes = _figure(2)
    speeds = {
        "reading": result.prefill,
        "predicted": result.predicted_prefill,
        "generating": result.decode,
        "predicted ": result.predicted_decode,
    }
    axes[0].bar(list(speeds), list(speeds.values()))
    axes[0].set(ylabel="tokens a second", yscale="log")
    _memory(axes[1], result.peak, result.plan, result.budget)
    figure.savefig(path)


def _memory(axes: Any, peak: int, plan: int, budget: int) -> None:
    axes.bar(["peak", "plan", "budget"], [size / 1e9 for size in (peak, plan, budget)])
    axes.set(ylabel="GB")


def _figure(columns: int = 1) -> Any:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(6 * columns, 4), layout="constrained")
