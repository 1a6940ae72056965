"""Caches of one byte a value: what rounding costs, and everything a stream can do with one."""

from __future__ import annotations

import pytest
import torch

from streamllm_core import Request, StreamingModel
from streamllm_core.architectures import LayerGeometry
from streamllm_core.cache import RollingCache
from streamllm_core.kv_storage import KVDtype, load, store
from tests.streamllm_core.tiny_engines import SINKS, random_tokens, read, run, small_engine

QUANTISED: tuple[KVDtype, ...] = ("int8", "fp8")
CPU = torch.device("cpu")
# Root mean square of the change in the logits ÷ their spread, for a random model (whose keys are as wide as any).
LOST = {"int8": 0.03, "fp8": 0.15}

pytestmark = pytest.mark.parametrize("kv_dtype", QUANTISED)


def poison(engine: object) -> None:
    """Fill every slot with what no product survives."""
    for layer in engine.cache.layers:  # type: ignore[attr-defined]
        for part in layer.parts.values():
            part.fill_(float("nan") if part.is_floating_point() else 127)  # in fp8 that is NaN, too


def test_a_row_is_stored_to_its_bound(kv_dtype: KVDtype) -> None:
    rows = torch.randn(3, 50, 32) * torch.logspace(-6, 2, 50)[:, None]
    rows[0, 7] = 0.0
    back = load(*store(rows, {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[kv_dtype]), torch.float32)
    if kv_dtype == "int8":
        bound = rows.abs().amax(-1, keepdim=True) / 254 * 1.001
    else:
        bound = (rows.abs() / 16).clamp_min(2**-10)  # below 2^-6 steps have one size
    assert ((back - rows).abs() <= bound).all()


def test_no_magnitude_becomes_nan(kv_dtype: KVDtype) -> None:
    rows = torch.tensor([[3e4, -1.0], [449.0, -6e4], [1e-30, 0.0]])
    back = load(*store(rows, {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[kv_dtype]), torch.float32)
    assert back.isfinite().all()
    assert back.abs().max() == (rows.abs().max() if kv_dtype == "int8" else 448)


def test_logits_stay_close_to_the_whole_cache(llama: StreamingModel, kv_dtype: KVDtype) -> None:
    tokens = random_tokens(150)
    whole, rounded = small_engine(llama), small_engine(llama, kv_dtype=kv_dtype)
    poison(rounded)
    wanted = read(whole, whole.open(sinks=SINKS), tokens)
    found = read(rounded, rounded.open(sinks=SINKS), tokens)
    assert 0 < (found - wanted).std() < LOST[kv_dtype] * wanted.std()


def test_layers_that_pin_and_layers_that_slide(mixed: StreamingModel, kv_dtype: KVDtype) -> None:
    tokens = random_tokens(90)
    whole, rounded = small_engine(mixed), small_engine(mixed, kv_dtype=kv_dtype)
    poison(rounded)
    wanted = read(whole, whole.open(sinks=SINKS), tokens)
    found = read(rounded, rounded.open(sinks=SINKS), tokens)
    assert 0 < (found - wanted).std() < LOST[kv_dtype] * wanted.std()


@pytest.mark.parametrize("length", [2, 29, 47, 150])
def test_a_restored_or_forked_stream_goes_on_bit_for_bit(llama: StreamingModel, kv_dtype: KVDtype, length: int) -> None:
    engine, other = small_engine(llama, kv_dtype=kv_dtype), small_engine(llama, kv_dtype=kv_dtype)
    stream = engine.open(sinks=SINKS)
    read(engine, stream, random_tokens(length))
    if length > 20:
        engine.evict(stream, length - 9, length - 6)
    run(engine, Request(stream, [5, 6, 7], max_new_tokens=9, excursion=True))
    tensors = engine.snapshot(stream)
    fork = engine.fork(stream)
    poison(other)
    more = random_tokens(50, 1)
    wanted = read(engine, stream, more)
    assert torch.equal(read(engine, fork, more), wanted)
    assert torch.equal(read(other, other.restore(tensors), more), wanted)


def test_a_snapshot_keeps_the_stored_bytes(llama: StreamingModel, kv_dtype: KVDtype) -> None:
    engine = small_engine(llama, kv_dtype=kv_dtype)
    stream = engine.open(sinks=SINKS)
    read(engine, stream, random_tokens(60))
    tensors = engine.snapshot(stream)
    assert tensors["keys.0"].dtype == {"int8": torch.int8, "fp8": torch.uint8}[kv_dtype]
    assert ("key_peaks.0" in tensors) == (kv_dtype == "int8")
    with pytest.raises(ValueError, match="dtype"):
        small_engine(llama).restore(tensors)


def test_an_excursion_leaves_no_trace(llama: StreamingModel, kv_dtype: KVDtype) -> None:
    engine = small_engine(llama, kv_dtype=kv_dtype)
    stream, undisturbed = engine.open(sinks=SINKS), engine.open(sinks=SINKS)
    for one in (stream, undisturbed):
        read(engine, one, random_tokens(77))
    run(engine, Request(stream, [5, 6, 7], max_new_tokens=9, excursion=True))
    more = random_tokens(30, 2)
    assert torch.equal(read(engine, stream, more), read(engine, undisturbed, more))


def test_memory_is_what_the_formula_says(kv_dtype: KVDtype) -> None:
    geometries = [LayerGeometry(True, 40), LayerGeometry(False, 20, "sliding_attention")]
    sizes = {"max_sinks": 4, "headroom": 16, "kv_heads": 3, "head_dim": 32, "dtype": torch.bfloat16}
    cache = RollingCache(geometries, slots=5, device=CPU, kv_dtype=kv_dtype, **sizes)
    used = sum(part.nbytes for layer in cache.layers for part in layer.parts.values())
    assert used == 5 * RollingCache.stream_bytes(geometries, kv_dtype=kv_dtype, **sizes)
    assert used < 0.57 * 5 * RollingCache.stream_bytes(geometries, **sizes)


def test_a_card_without_fp8_is_told_of_int8(kv_dtype: KVDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from streamllm_core.kv_storage import stored_dtype

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    card = torch.device("cuda", 0)
    if kv_dtype == "int8":
        assert stored_dtype(kv_dtype, torch.float16, card) == torch.int8
    else:
        with pytest.raises(ValueError, match="use int8"):
            stored_dtype(kv_dtype, torch.float16, card)
