"""What reports say of an engine: bytes that moved, passes, tokens, and the plan beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from streamllm_core import AutoModel, EngineConfig, Request
from streamllm_core.counters import counters
from tests.streamllm_core.tiny_engines import random_tokens


def test_counters_tell_what_was_done(folders: Callable[[int], Path]) -> None:
    model = AutoModel.from_pretrained(folders(4), device="cpu", dtype="float32", resident_layers=1)
    engine = model.engine(EngineConfig(window=40, sinks=2, excursion=8, streams=2, pass_tokens=16, draft_tokens=0))
    before = model.bytes_moved
    for seed in range(2):
        engine.submit(Request(engine.open(sinks=2), random_tokens(30, seed), max_new_tokens=3))
    while engine.busy:
        engine.step()
    report = counters(engine)
    assert report["passes"] == engine.passes > 4
    assert report["tokens_read"] == 2 * (30 + 2)
    assert report["tokens_generated"] == 6
    assert report["tokens_per_pass"] == round(70 / engine.passes, 1)
    assert report["drafts"] == {"drafted": 0, "accepted": 0, "tokens_per_turn": 1.0}
    assert report["link"]["streamed_layers"] == 3
    assert report["link"]["bytes"] == before + engine.passes * model.streamer.bytes_per_pass
    assert report["link"]["bytes_per_pass"] == model.streamer.bytes_per_pass
    assert report["link"]["gb_s"] >= 0
    assert report["speed"]["predicted_tokens_per_second"] > 0
    assert sum(report["memory"]["plan"].values()) == report["memory"]["plan_bytes"]
    assert 0 < report["seconds_in_passes"] < 60


def test_nothing_moves_where_everything_stays(folders: Callable[[int], Path]) -> None:
    model = AutoModel.from_pretrained(folders(3), device="cpu", dtype="float32")
    engine = model.engine(EngineConfig(window=40, streams=1))
    engine.submit(Request(engine.open(sinks=2), random_tokens(9)))
    engine.step()
    assert counters(engine)["link"] == {
        "streamed_layers": 0,
        "head_streamed": False,
        "bytes": 0,
        "bytes_per_pass": 0,
        "gb_s": 0.0,
        "measured_gb_s": counters(engine)["link"]["measured_gb_s"],
        "share_of_measured": 0.0,
    }
