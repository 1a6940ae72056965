"""Local folders: whole ones give what safetensors gives, torn ones are named."""

from __future__ import annotations

import json
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from streamllm_core.errors import ModelError
from streamllm_core.weights import open_source


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.fixture
def single(model: torch.nn.Module, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "single")
    return tmp_path / "single"


@pytest.fixture
def sharded(model: torch.nn.Module, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    return tmp_path / "sharded"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_gives_what_safetensors_gives(kind: str, request: pytest.FixtureRequest, model: torch.nn.Module) -> None:
    folder = request.getfixturevalue(kind)
    assert kind == "single" or len(shards(folder)) > 3
    source = open_source(folder)
    expected = {name: tensor for name, tensor in model.state_dict().items() if name in source.names()}
    assert set(source.names()) == set(model.state_dict())
    for name, tensor in expected.items():
        assert source.header(name) == (torch.bfloat16, tuple(tensor.shape))
        assert torch.equal(source.tensor(name), tensor)
        source.release(name)
        assert torch.equal(source.tensor(name), tensor)
    assert source.config_dir == folder
    assert source.name == str(folder)


def test_reads_from_many_threads(sharded: Path, model: torch.nn.Module) -> None:
    source = open_source(sharded)
    expected = model.state_dict()

    def check(name: str) -> bool:
        equal = torch.equal(source.tensor(name), expected[name])
        source.release(name)
        return equal

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, source.names() * 20))


def test_tensors_outlive_their_source(single: Path, model: torch.nn.Module) -> None:
    tensor = open_source(single).tensor("model.norm.weight")
    assert torch.equal(tensor, model.state_dict()["model.norm.weight"])


def test_every_stored_type_and_odd_shapes(tmp_path: Path) -> None:
    tensors = {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "flag": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "long": torch.arange(5),
        "half": torch.arange(7, dtype=torch.float16),
        "f8": torch.arange(5, dtype=torch.float32).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    source = open_source(tmp_path)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert source.header(name) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(source.tensor(name).to(torch.float64), tensor.to(torch.float64)), name


def test_unaligned_tensor_is_copied(tmp_path: Path) -> None:
    values = torch.arange(4, dtype=torch.float32)
    write_raw(
        tmp_path / "model.safetensors",
        {
            "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "next": {"dtype": "F32", "shape": [4], "data_offsets": [3, 19]},
        },
        b"abc" + values.numpy().tobytes(),
    )
    (tmp_path / "config.json").write_text("{}")
    assert torch.equal(open_source(tmp_path).tensor("next"), values)


def write_raw(path: Path, header: object, data: bytes = b"") -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (b"not json", b"", "not JSON"),
        ([1], b"", "not a JSON object"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", "lacks a type, shape or byte range"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234", "claims bytes 0 to 4"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12", "the file has"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345", "the file has"),
    ],
)
def test_corrupt_headers(tmp_path: Path, header: object, data: bytes, said: str) -> None:
    write_raw(tmp_path / "model.safetensors", header, data)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=said) as caught:
        open_source(tmp_path)
    assert "model.safetensors" in str(caught.value)


def test_unknown_type_is_refused_only_when_wanted(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", {"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, data=b"1")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="a is stored as F4"):
        open_source(tmp_path).header("a")


def test_truncated_files_are_named(single: Path, sharded: Path) -> None:
    for path in (single / "model.safetensors", shards(sharded)[2]):
        whole = path.read_bytes()
        for size in (0, 7, 40, len(whole) - 1):
            path.write_bytes(whole[:size])
            with pytest.raises(ModelError, match="not a whole safetensors file") as caught:
                open_source(path.parent)
            assert str(path) in str(caught.value)


def test_missing_shard_is_named(sharded: Path) -> None:
    gone = shards(sharded)[1]
    gone.unlink()
    with pytest.raises(ModelError, match=gone.name):
        open_source(sharded)


def test_index_that_does_not_fit_its_shards(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = list(index["weight_map"])
    swapped = index["weight_map"] | {names[0]: index["weight_map"][names[-1]]}
    for weight_map, said in (
        (swapped, f"does not hold {names[0]}"),
        ({names[0]: "../elsewhere.safetensors"}, "not a safetensors file beside it"),
        ({names[0]: "pytorch_model.bin"}, "not a safetensors file beside it"),
        ({}, "no weight_map"),
    ):
        path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError, match=said):
            open_source(sharded)


def test_what_is_missing_is_said(tmp_path: Path, single: Path) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no tensor named model\.layers\.99"):
        open_source(single).tensor("model.layers.99")
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights") as caught:
        open_source(single)
    assert "save_pretrained" in str(caught.value)
    (single / "pytorch_model.bin").rename(single / "weights.gguf")
    with pytest.raises(ModelError, match="give its own path"):
        open_source(single)
    (single / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_source(single)


def test_torn_config_is_named(single: Path) -> None:
    (single / "config.json").write_text('{"hidden')
    with pytest.raises(ModelError, match=r"config\.json: not valid JSON"):
        open_source(single)


@pytest.mark.parametrize("name", ["./no/model", "/no/model", "~/no-model", "a/b/c", "model.gguf", "a\\b"])
def test_paths_that_do_not_exist_are_no_hub_ids(name: str) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        open_source(name)


def test_a_file_is_no_folder(single: Path) -> None:
    with pytest.raises(ModelError, match="give the folder"):
        open_source(single / "model.safetensors")


def test_fingerprint_follows_the_files(single: Path, model: torch.nn.Module) -> None:
    before = open_source(single).fingerprint
    assert json.loads(json.dumps(before)) == before == open_source(single).fingerprint
    (single / "tokenizer_config.json").write_text("{}")
    with_tokenizer = open_source(single).fingerprint
    assert with_tokenizer != before
    model.save_pretrained(single)  # same header, same size, newer
    assert open_source(single).fingerprint != with_tokenizer


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and wants sparse files")
def test_memory_stays_small_beside_a_file_larger_than_ram(tmp_path: Path) -> None:
    layer, layers = 64 << 20, 1024  # 64 GB in a file of holes
    entries = {
        f"layer.{i}": {"dtype": "BF16", "shape": [layer // 2], "data_offsets": [i * layer, (i + 1) * layer]}
        for i in range(layers)
    }
    path = tmp_path / "model.safetensors"
    write_raw(path, entries)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + layer * layers)
    (tmp_path / "config.json").write_text("{}")
    before = resident_bytes()
    source = open_source(tmp_path)
    tensors = [source.tensor(name) for name in source.names()]
    assert resident_bytes() - before < 16 << 20  # mapped, not read
    slot = torch.empty(layer // 2, dtype=torch.bfloat16)
    slot.fill_(1)
    before = resident_bytes()
    for i in range(8):
        slot.copy_(tensors[i])
        source.release(f"layer.{i}")
        assert resident_bytes() - before < 16 << 20
    assert not slot.any()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
