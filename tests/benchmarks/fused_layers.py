"""One layer of Qwen2.5-7B's shape, piece by piece: stock transformers beside the fused kernels, in one run.

    python -m tests.benchmarks.fused_layers [--tokens 4096,16384] [--device cuda] [--dtype bfloat16] [--kernels]

A piece's bytes are what it must read and write at least; GB/s are given beside those of a plain copy on the device.
What fits the device's second-level cache (norm and rotary of 4,096 tokens on large cards) may beat the copy.
"limit" is what no fusion touches: the layer's matrix products and its attention, timed apart. ``--kernels`` lists
where the time of the whole fused layer goes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.nn import functional
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, apply_rotary_pos_emb

from streamllm_core.bench.passes import LONG_AGO
from streamllm_core.bench.shapes import Shape, random_model
from streamllm_core.engine_config import EngineConfig
from streamllm_core.fusion import Kernels, kernels_for
from streamllm_core.hardware import median_seconds
from streamllm_core.kernels import sink_window, sink_window_torch
from streamllm_core.kernels.scoring import Scoring
from streamllm_core.layout import Run, micro_batches
from streamllm_core.memory.limits import UNLIMITED
from streamllm_core.model import StreamingModel

SHAPE = Shape(1, 3584, 18_944, 28, 4, 1000)
WINDOW, SINKS = 2048, 4
REPEATS = 20
HEAD_DIM = SHAPE.hidden // SHAPE.heads


def repeated(run: Callable[[], Any]) -> None:
    """Often enough that launching and waiting do not show."""
    for _ in range(REPEATS):
        run()


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second read and written by a copy of 1 GiB (64 MiB on a CPU)."""
    source = torch.empty(2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device)


def pieces(kernels: Kernels, tokens: int, place: dict[str, Any]) -> dict[str, tuple[int, Callable[[], Any], Any]]:
    """Name → bytes at least, stock, fused."""
    hidden = torch.randn(1, tokens, SHAPE.hidden, **place)
    norm = Qwen2RMSNorm(SHAPE.hidden).to(**place)
    gate, up = torch.randn(2, 1, tokens, SHAPE.intermediate, **place)
    query = torch.randn(1, tokens, SHAPE.heads, HEAD_DIM, **place).transpose(1, 2)
    key = torch.randn(1, tokens, SHAPE.kv_heads, HEAD_DIM, **place).transpose(1, 2)
    angles = torch.rand(tokens, HEAD_DIM // 2, device=place["device"])
    plain = angles.cos(), angles.sin()
    tables = [torch.cat([table, table], -1)[None].to(place["dtype"]) for table in plain]

    def stock_rotation() -> None:
        apply_rotary_pos_emb(query, key, *tables)  # by zero, inside the model
        apply_rotary_pos_emb(query, key, *tables)
        apply_rotary_pos_emb(query, key[:, :0], *tables)

    return {
        "norm": (
            2 * hidden.nbytes,
            lambda: norm(hidden),
            lambda: kernels.rms_norm(hidden, norm.weight, 1e-6, 0.0, True),
        ),
        "silu * up": (3 * gate.nbytes, lambda: functional.silu(gate) * up, lambda: kernels.gate_(gate, up, "silu")),
        "rotary": (
            3 * query.nbytes + 2 * key.nbytes,
            stock_rotation,
            lambda: kernels.rotate(query, key, plain, plain, False),
        ),
    }


def prepared(tokens: int, place: dict[str, Any], *, fused: bool) -> tuple[StreamingModel, Any]:
    """A model of one layer, in the middle of a pass of ``tokens`` tokens of texts in chunks of about 1,024, and the
    function that runs the layer."""
    number = str(place["dtype"]).removeprefix("torch.")
    with random_model(
        SHAPE, device=str(place["device"]), dtype=number, quantize=None, vram=UNLIMITED, fused=fused
    ) as model:
        pass
    streams = max(1, tokens // 1024)
    config = EngineConfig(WINDOW, SINKS, excursion=0, streams=streams, pass_tokens=tokens, micro_tokens=tokens)
    engine = model.engine(config)
    for ring in engine.cache.layers:
        ring.keys.normal_()
        ring.values.normal_()
    runs = [Run(slot, 0, tokens // streams, LONG_AGO, SINKS) for slot in range(streams)]
    state = model.state
    state.cache, state.rotary = engine.cache, engine.rotary
    state.batches = micro_batches(runs, tokens, model.device)
    hidden = torch.randn(1, tokens, SHAPE.hidden, **place)
    positions = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
    embeddings = model.rotary_module(hidden, positions)
    layer = model._skeleton.layers[0]
    return model, lambda: layer(hidden, position_embeddings=embeddings)


def limit(model: StreamingModel, tokens: int, place: dict[str, Any]) -> Callable[[], None]:
    """The products and the attention of the prepared layer."""
    layer = model._skeleton.layers[0]
    (batch,) = model.state.batches
    (ring,) = model.state.cache.layers  # type: ignore[union-attr]
    inputs = {wide: torch.randn(1, tokens, wide, **place) for wide in (SHAPE.hidden, SHAPE.intermediate)}
    query = torch.randn(SHAPE.heads, tokens, HEAD_DIM, **place)
    linears = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]
    kernel = sink_window if sink_window.available(model.device) else sink_window_torch

    def run() -> None:
        for linear in linears:
            linear(inputs[linear.in_features])
        kernel.attend(ring, batch, query, query, Scoring(HEAD_DIM**-0.5, None, None))

    return run


def print_kernels(layer: Callable[[], Any], device: torch.device) -> None:
    """Milliseconds of each kernel in one run of the layer, the longest first."""
    with torch.profiler.profile() as profile:
        layer()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    events = [event for event in profile.key_averages() if event.device_type == DeviceType.CUDA]
    for event in sorted(events, key=lambda event: -event.self_device_time_total)[:16]:
        print(f"    {event.self_device_time_total / 1e3:>8.3f} ms {event.count:>3} x {event.key[:90]}")


@torch.inference_mode()
def measure(tokens: int, place: dict[str, Any], bandwidth: float, *, kernels_listed: bool) -> None:
    kernels = kernels_for(place["device"], place["dtype"])
    if kernels is None:
        raise SystemExit("Triton is needed on CUDA, and a dtype of at most 32 bits")
    print(f"{tokens} tokens: {'piece':<12} {'stock ms':>9} {'fused ms':>9} {'fused GB/s':>11} {'of a copy':>10}")
    margin = " " * len(f"{tokens} tokens: ")
    for name, (moved, stock, fused) in pieces(kernels, tokens, place).items():
        times = [median_seconds(partial(repeated, run), place["device"]) / REPEATS for run in (stock, fused)]
        speed = moved / times[1]
        print(
            f"{margin}{name:<12} {1e3 * times[0]:>9.3f} {1e3 * times[1]:>9.3f} "
            f"{speed / 1e9:>11.0f} {speed / bandwidth:>10.2f}"
        )
    times = []
    for fused in (False, True):
        model, layer = prepared(tokens, place, fused=fused)
        times.append(median_seconds(layer, place["device"]))
    bound = median_seconds(limit(model, tokens, place), place["device"])
    print(
        f"{margin}{'whole layer':<12} {1e3 * times[0]:>9.3f} {1e3 * times[1]:>9.3f}   limit {1e3 * bound:.3f} ms, "
        f"limit/stock {bound / times[0]:.3f}, limit/fused {bound / times[1]:.3f}"
    )
    if kernels_listed:
        print_kernels(layer, place["device"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="4096,16384", help="tokens that go through the layer together")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of the fused layer")
    options = parser.parse_args()
    place = {"device": torch.device(options.device), "dtype": getattr(torch, options.dtype)}
    bandwidth = copy_bandwidth(place["device"])
    print(f"copy: {bandwidth / 1e9:.0f} GB/s read and written; window {WINDOW}, {SINKS} sinks, {options.dtype}")
    for tokens in options.tokens.split(","):
        measure(int(tokens), place, bandwidth, kernels_listed=options.kernels)


if __name__ == "__main__":
    main()
