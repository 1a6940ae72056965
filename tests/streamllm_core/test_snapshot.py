"""A stream on disk: the same bits in another slot, another engine, another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import streamllm_core
from streamllm_core import Engine, Request, Stream, StreamingModel
from tests.streamllm_core.tiny_engines import SINKS, random_tokens, read, run, small_engine

# Within the sinks, before the window is full, full, in the ring's second turn, long after.
LENGTHS = (2, 20, 29, 47, 150)
MORE = random_tokens(50, 1)


def prepared(engine: Engine, length: int) -> Stream:
    """A stream of so many tokens, with holes when it is long enough, and an excursion behind it."""
    stream = engine.open(sinks=SINKS)
    read(engine, stream, random_tokens(length))
    if length > 20:
        engine.evict(stream, length - 9, length - 6)
        engine.evict(stream, length - 4, length - 3)
    run(engine, Request(stream, [5, 6, 7], max_new_tokens=9, excursion=True))
    return stream


def test_a_new_process_goes_on_bit_for_bit(llama: StreamingModel, folders: object, tmp_path: Path) -> None:
    wanted: dict[str, Tensor] = {}
    for length in LENGTHS:
        engine = small_engine(llama)
        stream = prepared(engine, length)
        save_file(engine.snapshot(stream), tmp_path / f"{length}.safetensors")
        assert stream.last_hidden is not None
        wanted[f"{length}.next"] = llama.head(stream.last_hidden[None]).cpu()
        wanted[f"{length}.more"] = read(engine, stream, MORE)
    script = Path(__file__).with_name("restored_streams.py")
    paths = [str(Path(streamllm_core.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    arguments = [folders(3), llama.device, tmp_path, *LENGTHS]  # type: ignore[operator]
    subprocess.run([sys.executable, script, *map(str, arguments)], check=True, env=where, timeout=300)
    found = load_file(tmp_path / "found.safetensors")
    assert found.keys() == wanted.keys()
    for name, logits in wanted.items():
        assert torch.equal(found[name], logits), name


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("sliding", [False, True])
def test_another_engine_goes_on_bit_for_bit(
    llama: StreamingModel, mixed: StreamingModel, sliding: bool, length: int
) -> None:
    """Also one with other limits: only the window is part of a stream."""
    loaded = mixed if sliding else llama
    engine = small_engine(loaded)
    stream = prepared(engine, length)
    tensors = engine.snapshot(stream)
    original = read(engine, stream, MORE, 12)
    other = small_engine(loaded, streams=2, excursion=30, sinks=9, pass_tokens=50)
    copy = other.restore(tensors)
    assert (copy.length, copy.sinks) == (length, SINKS)
    assert (read(other, copy, MORE, 12) - original).abs().max() < 1e-4
    same = small_engine(loaded)
    copy = same.restore(tensors)
    assert torch.equal(read(same, copy, MORE, 12), original)


def test_snapshots_have_one_size_however_much_was_read(llama: StreamingModel) -> None:
    engine = small_engine(llama)
    stream = engine.open(sinks=SINKS)
    sizes = set()
    for _ in range(12):
        read(engine, stream, random_tokens(37))
        tensors = engine.snapshot(stream)
        sizes.add(sum(tensor.nbytes for tensor in tensors.values()))
        assert all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors.values())
    per_layer = 2 * 2 * 8 * 4 * (SINKS + 24)  # keys and values, 2 heads of 8, float32
    assert sizes == {3 * per_layer + 32 * 4 + 24 * 4 + 2 * 8}  # … last hidden state; ids; length and sinks


def test_a_stream_on_an_excursion_is_not_saved(llama: StreamingModel) -> None:
    engine = small_engine(llama)
    stream = engine.open(sinks=SINKS)
    read(engine, stream, random_tokens(40))
    engine.submit(Request(stream, [5, 6], max_new_tokens=5, excursion=True))
    engine.step()
    with pytest.raises(ValueError, match="excursion"):
        engine.snapshot(stream)
    while engine.busy:
        engine.step()
    engine.snapshot(stream)


@pytest.mark.parametrize("window", [23, 25, 60])
def test_a_snapshot_of_another_window_is_refused(llama: StreamingModel, window: int) -> None:
    engine, other = small_engine(llama), small_engine(llama, window=window)
    tensors = engine.snapshot(prepared(engine, 90))
    with pytest.raises(ValueError, match="another window"):
        other.restore(tensors)
    assert other.free_streams == 4


def test_a_snapshot_of_another_dtype_is_refused(llama: StreamingModel, load: object) -> None:
    engine = small_engine(llama)
    double = small_engine(load(3, llama.device.type, dtype="float64"))  # type: ignore[operator]
    with pytest.raises(ValueError, match="dtype"):
        double.restore(engine.snapshot(prepared(engine, 30)))


def test_a_snapshot_taken_while_reading_goes_on_from_there(llama: StreamingModel) -> None:
    """Between passes a document can be saved half-way through a chunk of text."""
    text = random_tokens(100)
    engine = small_engine(llama, pass_tokens=20)
    request = Request(engine.open(sinks=SINKS), text)
    engine.submit(request)
    for _ in range(3):
        engine.step()
    tensors = engine.snapshot(request.stream)
    while engine.busy:
        engine.step()
    other = small_engine(llama, pass_tokens=20)
    copy = other.restore(tensors)
    run(other, Request(copy, text[copy.length :]))
    assert copy.last_hidden is not None
    assert request.stream.last_hidden is not None
    assert torch.equal(copy.last_hidden, request.stream.last_hidden)
