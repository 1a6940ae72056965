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
from streamllm_core.cache import RingLayer
from streamllm_core.kernels import sink_window, sink_window_torch
from streamllm_core.layout import Run, micro_batches

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs CUDA, or Triton with TRITON_INTERPRET=1"
)

CASES = [
    # heads, kv heads, head dim, sinks, recent, softcap, s_aux, holes
    (4, 2, 64, 4, 60, None, False, False),
    (28, 4, 128, 20, 200, None, False, False),
    (6, 2, 80, 0, 33, None, False, False),
    (8, 1, 64, 70, 100, 30.0, False, False),
    (8, 8, 96, 3, 40, None, True, True),
    (4, 2, 256, 16, 50, 50.0, False, True),
    (14, 2, 64, 5, 300, None, True, False),
]


# The interpreter works on numpy arrays, which have no bf16.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16 if DEVICE.type == "cuda" else torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case: tuple, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, kv_heads, head_dim, sinks, recent, softcap, aux, holes = case
    if DEVICE.type == "cpu":
        monkeypatch.setattr(sink_window, "_shared_memory", lambda _: 100_000)
    rng = random.Random(str(case))
    torch.manual_seed(rng.randrange(2**31))
    slots, headroom = 6, 64
    exact = RingLayer(LayerGeometry(True, recent), slots, sinks, headroom, kv_heads, head_dim, torch.float64, DEVICE)
    exact.keys.normal_()
    exact.values.normal_()
    ring = RingLayer(LayerGeometry(True, recent), slots, sinks, headroom, kv_heads, head_dim, dtype, DEVICE)
    ring.keys.copy_(exact.keys)
    ring.values.copy_(exact.values)
    exact.keys.copy_(ring.keys)  # what rounding took is gone for both
    exact.values.copy_(ring.values)

    starts = [0, 1, recent + sinks, 5 * recent, 3 * 2**40 + 3]
    runs = []
    for slot, start in zip(rng.sample(range(slots), len(starts)), starts, strict=True):
        spans = ((start - recent // 2, start - recent // 4), (start - 5, start - 3)) if holes and start > 500 else ()
        runs.append(Run(slot, 0, rng.choice([1, 2, 17, headroom]), start, sinks, spans))
    (batch,) = micro_batches(runs, 10_000, DEVICE)
    query = torch.randn(2, heads, batch.tokens, head_dim, device=DEVICE).to(dtype)
    young = batch.positions <= sinks + recent  # nothing evicted yet: both rotations are the same
    query[1, :, young] = query[0, :, young]
    s_aux = torch.randn(heads, device=DEVICE) if aux else None

    (fresh,) = micro_batches(runs, 10_000, DEVICE)
    expected = sink_window_torch.attend(
        exact, fresh, query[0].double(), query[1].double(), head_dim**-0.5, softcap, s_aux
    )
    actual = sink_window.attend(ring, batch, query[0], query[1], head_dim**-0.5, softcap, s_aux)
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)
