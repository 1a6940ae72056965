"""Bytes from disk: whole, in place, and with an error that names the file when they are not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from streamllm_core import AutoModel
from streamllm_core.errors import ModelError
from streamllm_core.weights import reading
from streamllm_core.weights.folder import FolderSource
from streamllm_core.weights.reading import FileRange, RangeReader, drop_from_page_cache
from tests.streamllm_core.tiny_llama import write_llama


@pytest.fixture(params=[False, True])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RangeReader:
    """With pieces of a few bytes, so that ranges are cut."""
    monkeypatch.setattr(reading, "PIECE_BYTES", 1000)
    return RangeReader(drop_behind=request.param, threads=3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(torch.randint(256, (20_011,), dtype=torch.uint8).tolist()))
    return path


def filled(nbytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.full((nbytes,), 0xAA, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("offset", [0, 1, 4096])
@pytest.mark.parametrize("nbytes", [0, 1, 999, 1000, 1001, 12_345])
def test_ranges_are_read_into_place(reader: RangeReader, file: Path, offset: int, nbytes: int) -> None:
    around = filled(nbytes + 20)
    other = filled(100)
    wanted = [(FileRange(file, offset, nbytes), around[10 : 10 + nbytes]), (FileRange(file, 7, 100), other)]
    reader.read(wanted)
    content = file.read_bytes()
    assert bytes(around.tolist()) == b"\xaa" * 10 + content[offset : offset + nbytes] + b"\xaa" * 10
    assert bytes(other.tolist()) == content[7:107]


def test_any_type_and_shape(reader: RangeReader, file: Path) -> None:
    target = filled(24, torch.bfloat16).view(3, 4)
    scalar = filled(8, torch.int64)[0]
    reader.read([(FileRange(file, 3, 24), target), (FileRange(file, 5, 8), scalar)])
    assert bytes(target.view(torch.uint8).flatten().tolist()) == file.read_bytes()[3:27]
    assert int(scalar) == int.from_bytes(file.read_bytes()[5:13], "little", signed=True)


def test_a_range_of_another_size_is_refused(reader: RangeReader, file: Path) -> None:
    with pytest.raises(ValueError, match="do not fill"):
        reader.read([(FileRange(file, 0, 10), filled(11))])


def test_a_file_that_ends_too_soon(reader: RangeReader, file: Path) -> None:
    with pytest.raises(ModelError, match=r"bytes: ended at byte 20,011"):
        reader.read([(FileRange(file, 15_000, 6000), filled(6000))])


def test_a_file_that_is_gone(reader: RangeReader, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent: cannot be read"):
        reader.read([(FileRange(tmp_path / "absent", 0, 10), filled(10))])


def test_a_file_that_was_replaced(reader: RangeReader, file: Path) -> None:
    before = file.stat().st_mtime_ns
    reader.read([(FileRange(file, 0, 10, before), filled(10))])
    os.utime(file, ns=(before, before + 10**9))
    with pytest.raises(ModelError, match="bytes: has changed"):
        reader.read([(FileRange(file, 0, 10, before), filled(10))])


def test_dropping_a_file_from_the_page_cache_keeps_it(file: Path) -> None:
    content = file.read_bytes()
    drop_from_page_cache(file)
    assert file.read_bytes() == content


def test_ranges_of_a_folder_are_its_tensors(reader: RangeReader, tmp_path: Path) -> None:
    source = FolderSource(write_llama(tmp_path), name="tiny")
    for name, value in load_file(tmp_path / "model.safetensors").items():
        target = torch.full_like(value, float("nan"))
        reader.read([(source.range(name), target)])
        assert torch.equal(target, value)


@pytest.fixture
def read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the module tensors that were read as stored."""
    from streamllm_core.checkpoint import Checkpoint

    names: list[str] = []
    read = Checkpoint._read_as_stored

    def recorded(checkpoint: Checkpoint, *arguments: Any) -> set[str]:
        found = read(checkpoint, *arguments)
        names.extend(found)
        return found

    monkeypatch.setattr(Checkpoint, "_read_as_stored", recorded)
    return names


@pytest.mark.parametrize(("dtype", "direct"), [("float32", True), ("bfloat16", False)])
def test_layers_are_read_as_stored_where_nothing_is_converted(
    folders: Callable[[int], Path], read_names: list[str], dtype: str, direct: bool
) -> None:
    model = AutoModel.from_pretrained(folders(3), device="cpu", dtype=dtype, resident_layers=3)
    read_names = [name for name in read_names if ".layers." in name]
    assert len(read_names) == (3 * 9 if direct else 0)
    stored = load_file(folders(3) / "model.safetensors")
    for index, layer in enumerate(model._skeleton.layers):
        for name, value in layer.state_dict().items():
            rounded = stored[f"model.layers.{index}.{name}"].to(getattr(torch, dtype))
            assert torch.equal(value, rounded.to(value.dtype))


def test_a_file_that_goes_away_while_layers_stream(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model", layers=4)
    model = AutoModel.from_pretrained(folder, device="cpu", dtype="float32", resident_layers=0)
    ids = torch.tensor([[1, 2, 3]])
    wanted = model.logits(ids)
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        [model.logits(ids) for _ in range(2)]
    (tmp_path / "elsewhere").rename(folder / "model.safetensors")
    assert torch.equal(model.logits(ids), wanted)
