"""What an engine has done, as numbers for a report: that it streams, how fast, and how that compares with its plan."""

from __future__ import annotations

from typing import Any

import torch

from streamllm_core.engine import Engine


def counters(engine: Engine) -> dict[str, Any]:
    """Bytes, seconds and tokens since the engine was made; seconds are those spent in passes.

    ``link`` is what weights cross on their way to the device (the bus, or the disk on a CPU), with the rate that was
    measured for it beforehand. ``speed`` compares tokens a second with the plan's prediction for a long job.
    """
    model, plan, seconds = engine.model, engine.plan, max(engine.seconds, 1e-9)
    tokens = engine.tokens_read + engine.tokens_generated
    moved = model.bytes_moved
    rate = model.manager.rates.host_to_device
    report: dict[str, Any] = {
        "passes": engine.passes,
        "seconds_in_passes": round(seconds, 3),
        "tokens_read": engine.tokens_read,
        "tokens_generated": engine.tokens_generated,
        "tokens_per_pass": round(tokens / max(engine.passes, 1), 1),
        "drafts": {
            "drafted": engine.tokens_drafted,
            "accepted": engine.tokens_accepted,
            "tokens_per_turn": round(engine.tokens_per_turn, 2),
        },
        "link": {
            "streamed_layers": len(plan.placement.streamed),
            "head_streamed": not plan.placement.head_stays,
            "bytes": moved,
            "bytes_per_pass": plan.placement.bytes_per_pass,
            "gb_s": round(moved / seconds / 1e9, 3),
            "measured_gb_s": round(rate / 1e9, 3),
            "share_of_measured": round(moved / seconds / rate, 3),
        },
        "speed": {
            "tokens_per_second": round(tokens / seconds, 1),
            "predicted_tokens_per_second": round(plan.prediction.job, 1),
        },
        "memory": {"budget_bytes": plan.budget, "plan_bytes": plan.total, "plan": plan.items()},
    }
    if model.device.type == "cuda":
        report["memory"]["peak_bytes"] = torch.cuda.max_memory_allocated(model.device)
    return report
