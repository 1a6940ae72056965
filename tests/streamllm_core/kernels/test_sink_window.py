"""The CUDA attention kernel against the torch reference in float64, on random shapes.

Without a card the kernel runs through Triton's interpreter (TRITON_INTERPRET=1), where Triton is installed.
"""

from __future__ import annotations

import importlib.util
import os
import random

import pytest
import torch

from streamllm_core.architectures import LayerGeometry
from streamllm_core.kernels import sink_window, sink_window_torch
from streamllm_core.kernels.scoring import Scoring
from streamllm_core.kernels.sink_window_tiles import Card
from streamllm_core.kv_storage import KVDtype, load, store
from streamllm_core.layout import Run, micro_batches
from streamllm_core.ring import RingLayer

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs CUDA, or Triton with TRITON_INTERPRET=1"
)

# The interpreter works on numpy arrays, which have no bf16.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
# heads, kv heads, head dim, sinks, recent, softcap, s_aux, holes, dtype, stored, splits
CASES = {
    "small": (4, 2, 64, 4, 60, None, False, False, HALF, "auto", 1),
    "small-int8": (3, 1, 48, 35, 90, 30.0, True, True, HALF, "int8", 3),
    "small-fp8": (4, 1, 64, 0, 70, None, True, False, HALF, "fp8", 2),
    "small-float32": (2, 1, 32, 3, 40, None, False, True, torch.float32, "auto", 2),
    "qwen": (28, 4, 128, 20, 200, None, False, False, HALF, "auto", 1),
    "qwen-float32": (28, 4, 128, 20, 200, None, False, False, torch.float32, "auto", 4),
    "qwen-int8": (28, 4, 128, 20, 200, None, False, False, HALF, "int8", 1),
    "qwen-fp8": (28, 4, 128, 20, 200, None, False, False, HALF, "fp8", 4),
    "no sinks": (6, 2, 80, 0, 33, None, False, False, HALF, "auto", 2),
    "many sinks": (8, 1, 64, 70, 100, 30.0, False, False, torch.float32, "int8", 1),
    "no groups": (8, 8, 96, 3, 40, None, True, True, HALF, "auto", 1),
    "gemma": (4, 2, 256, 16, 50, 50.0, False, True, HALF, "auto", 2),
    "gemma-int8": (4, 2, 256, 16, 50, 50.0, False, True, torch.float32, "int8", 1),
    "gpt-oss": (14, 2, 64, 5, 300, None, True, False, HALF, "auto", 3),
    "padded": (6, 3, 112, 33, 150, 20.0, True, True, HALF, "fp8", 1),
    "one kv head": (71, 1, 64, 4, 60, None, False, False, HALF, "auto", 1),
}
SLOTS, HEADROOM = 6, 64


def filled(stored: KVDtype, dtype: torch.dtype, *sizes: int) -> RingLayer:
    """A ring with random keys and values in every row: (sinks, recent, kv heads, head dim)."""
    sinks, recent, kv_heads, head_dim = sizes
    ring = RingLayer(LayerGeometry(True, recent), SLOTS, sinks, HEADROOM, kv_heads, head_dim, dtype, DEVICE, stored)
    shape = (SLOTS, kv_heads, sinks + recent + HEADROOM, head_dim)
    for part, peaks in ((ring.keys, ring.key_peaks), (ring.values, ring.value_peaks)):
        new, new_peaks = store(torch.randn(shape, device=DEVICE), part.dtype)
        part.copy_(new)
        if peaks is not None:
            peaks.copy_(new_peaks)
    return ring


def in_float64(ring: RingLayer, *sizes: int) -> RingLayer:
    """What a ring holds, rounding included, for the reference."""
    exact = filled("auto", torch.float64, *sizes)
    exact.keys.copy_(load(ring.keys, ring.key_peaks, torch.float64))
    exact.values.copy_(load(ring.values, ring.value_peaks, torch.float64))
    return exact


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, kv_heads, head_dim, sinks, recent, softcap, aux, holes, dtype, stored, splits = CASES[case]
    if DEVICE.type == "cpu":
        monkeypatch.setattr(Card, "of", staticmethod(lambda _: Card(100_000, 100)))
    elif stored == "fp8" and torch.cuda.get_device_capability(DEVICE) < (8, 9):
        pytest.skip("the card has no fp8")
    monkeypatch.setattr(sink_window, "choose_splits", lambda *_: splits)
    rng = random.Random()
    torch.manual_seed(rng.randrange(2**31))
    sizes = (sinks, recent, kv_heads, head_dim)
    ring = filled(stored, dtype, *sizes)
    exact = in_float64(ring, *sizes)

    starts = [0, 1, recent + sinks, 5 * recent, 3 * 2**40 + 3]
    runs = []
    for slot, start in zip(rng.sample(range(SLOTS), len(starts)), starts, strict=True):
        spans = ((start - recent // 2, start - recent // 4), (start - 5, start - 3)) if holes and start > 500 else ()
        runs.append(Run(slot, 0, rng.choice([1, 2, 17, HEADROOM]), start, sinks, spans))
    (batch,) = micro_batches(runs, 10_000, DEVICE)
    query = torch.randn(2, heads, batch.tokens, head_dim, device=DEVICE).to(dtype)
    young = batch.positions <= sinks + recent  # nothing evicted yet: both rotations are the same
    query[1, :, young] = query[0, :, young]
    scoring = Scoring(head_dim**-0.5, softcap, torch.randn(heads, device=DEVICE) if aux else None)

    (fresh,) = micro_batches(runs, 10_000, DEVICE)
    expected = sink_window_torch.attend(exact, fresh, query[0].double(), query[1].double(), scoring)
    actual = sink_window.attend(ring, batch, query[0], query[1], scoring)
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_another_prompt_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from streamllm_core.kernels.sink_window_triton import attention

    monkeypatch.setattr(sink_window, "choose_splits", lambda *_: 1)
    ring = filled("auto", HALF, 64, 100, 2, 64)
    variants = set()
    for sinks, start in ((3, 700), (0, 5), (1, 1), (16, 4096), (17, 2**40), (64, 999)):
        (batch,) = micro_batches([Run(0, 0, 1, start, sinks), Run(1, 0, 30, start, sinks)], 100, DEVICE)
        query = torch.randn(4, batch.tokens, 64, device=DEVICE).to(HALF)
        sink_window.attend(ring, batch, query, query, Scoring(0.125))
        variants.add(sum(len(caches[0]) for caches in attention.device_caches.values()))
    assert len(variants) == 1
