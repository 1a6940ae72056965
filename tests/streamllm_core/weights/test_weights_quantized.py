"""Quantizing on load: what is packed and what is not, the same logits as the expanded weights, built once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import conversion_processes
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig

from streamllm_core.checkpoint import Checkpoint
from streamllm_core.errors import ModelError
from streamllm_core.memory.arena import ArenaLayout
from streamllm_core.quantization import FORMATS, expand, quantize
from streamllm_core.skeleton import Skeleton, read_config
from streamllm_core.weights import WeightSource, open_source, quantized, safetensors_writer
from streamllm_core.weights.folder import FolderSource
from streamllm_core.weights.quantized import format_for, quantize_source
from tests.streamllm_core.tiny_models import TINY, save_tiny

NAMES = ["qwen3", "gpt_neox", "phi3", "gemma3", "qwen3_moe", "gpt_oss"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STREAMLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def skeleton_of(source: WeightSource, dtype: torch.dtype = torch.float32) -> Skeleton:
    return Skeleton(read_config(source), dtype)


def quantized_source(folder: Path, format_name: str = "int4", dtype: torch.dtype = torch.float32) -> FolderSource:
    source = open_source(folder)
    return quantize_source(source, skeleton_of(source), format_name, dtype)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_tiny("llama-yarn-biases", tmp_path / "llama")


@pytest.mark.parametrize("format_name", ["int8", "int4"])
@pytest.mark.parametrize("name", [name for name in TINY if name.split("-")[0] in NAMES])
def test_values_are_those_of_the_modules_quantized(name: str, format_name: str, tmp_path: Path) -> None:
    folder = save_tiny(name, tmp_path / name)
    plain = open_source(folder)
    packed = quantized_source(folder, format_name)
    assert packed.module_names
    skeleton = skeleton_of(packed)
    before = dict(Checkpoint(plain, skeleton_of(plain), torch.float32).tensors(""))
    checkpoint = Checkpoint(packed, skeleton, torch.float32)
    after = dict(checkpoint.tensors(""))
    assert set(after) == set(before) == set(packed.names())
    for tensor_name, value in before.items():
        format = checkpoint.format(tensor_name)
        expected = value
        if format is not None:
            expected = torch.full_like(value, torch.nan)
            raw = quantize(format, value)
            assert torch.equal(checkpoint.raw(tensor_name), raw)
            expand(format, raw, expected)
        assert packed.header(tensor_name)[1] == value.shape
        assert torch.equal(after[tensor_name], expected), tensor_name
        layer = tensor_name.startswith(skeleton.layers_prefix)
        plainly = "norm" in tensor_name or tensor_name.endswith(("bias", ".gate.weight", ".router.weight", "sinks"))
        held = value.shape[-1] % 32 == 0
        if tensor_name == "lm_head.weight" or tensor_name == "embed_out.weight":
            assert format == FORMATS["int8"]
        else:
            assert (format is not None) == (layer and not plainly and held), tensor_name
            values = tensor_name.endswith(".v_proj.weight")
            assert format in (None, FORMATS["int8" if values else format_name])
        assert format == format_for(tensor_name, tuple(value.shape), skeleton, format_name)


def test_layers_are_filled_with_one_rounding(llama: Path) -> None:
    packed = quantized_source(llama, dtype=torch.bfloat16)
    checkpoint = Checkpoint(packed, skeleton_of(packed), torch.bfloat16)
    prefix = "model.layers.1."
    layout = ArenaLayout.of(Skeleton(read_config(packed), torch.float16).layers[1])
    block = torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8)
    checkpoint.fill(prefix, layout, block)
    for name, view in layout.stored(block).items():
        stored = packed.tensor(prefix + name)
        assert stored.dtype == (torch.bfloat16 if packed.format(prefix + name) is None else torch.float32)
        assert torch.equal(view, stored.to(torch.float16))


def test_written_as_safetensors_reads_it(llama: Path) -> None:
    packed = quantized_source(llama)
    with safe_open(packed.config_dir / "model.safetensors", "pt") as file:
        formats = json.loads(file.metadata()["streamllm.packed"])
        assert set(file.keys()) == set(packed.names())
        for name in file.keys():  # noqa: SIM118
            stored = file.get_tensor(name)
            format = packed.format(name)
            assert torch.equal(stored, packed.tensor(name) if format is None else packed.raw(name))
            assert formats.get(name) == (None if format is None else [format.name, list(packed.header(name)[1])])


def test_folder_stands_for_itself(llama: Path) -> None:
    """It opens as any model folder does, tokenizer and configuration included."""
    (llama / "tokenizer.json").write_text("{}")
    packed = quantized_source(llama)
    again = open_source(packed.config_dir)
    assert (packed.config_dir / "config.json").read_bytes() == (llama / "config.json").read_bytes()
    assert (packed.config_dir / "tokenizer.json").read_text() == "{}"
    name = "model.layers.0.mlp.up_proj.weight"
    assert again.format(name) == FORMATS["int4"]
    assert torch.equal(again.raw(name), packed.raw(name))
    packed.release(name)
    assert torch.equal(again.tensor(name), packed.tensor(name))


def test_logits_with_the_expanded_weights(llama: Path) -> None:
    """Stock transformers with the expanded weights is close to the original model, and int8 closer than int4."""
    ids = torch.arange(60).reshape(1, 60)
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    errors = {}
    with torch.no_grad():
        expected = model(ids).logits
        for format_name in ("int8", "int4"):
            packed = quantized_source(llama, format_name)
            model.load_state_dict(dict(Checkpoint(packed, skeleton_of(packed), torch.float32).tensors("")))
            errors[format_name] = float((model(ids).logits - expected).norm() / expected.norm())
    assert 0 < errors["int8"] < 0.05 < 4 * errors["int8"] < errors["int4"] < 1


def test_built_once_and_again_when_something_differs(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = quantized_source(llama)
    others = [quantized_source(llama, "int8"), quantized_source(llama, dtype=torch.bfloat16)]
    monkeypatch.setattr(quantized, "quantize", None)  # from now on nothing is quantized
    again = quantized_source(llama)
    assert (again.config_dir, again.fingerprint, again.name) == (first.config_dir, first.fingerprint, str(llama))
    for other in others:
        assert other.config_dir != first.config_dir
        assert other.fingerprint != first.fingerprint
    assert first.fingerprint["quantized"] == "int4"
    (llama / "model.safetensors").touch()
    monkeypatch.undo()
    monkeypatch.setenv("STREAMLLM_CACHE", str(first.config_dir.parent))
    assert quantized_source(llama).config_dir != first.config_dir


def test_reopening_does_not_touch_the_weights(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized_source(llama)
    source = open_source(llama)

    def unread(name: str) -> Any:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(source, "tensor", unread)
    monkeypatch.setattr("streamllm_core.checkpoint.get_model_conversion_mapping", unread)
    packed = quantize_source(source, skeleton_of(source), "int4", torch.float32)
    Checkpoint(packed, skeleton_of(packed), torch.float32)


def test_shards(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = quantized_source(llama)
    whole = {name: packed.tensor(name).clone() for name in packed.names()}
    monkeypatch.setattr(safetensors_writer, "SHARD_BYTES", 20_000)
    monkeypatch.setenv("STREAMLLM_CACHE", str(packed.config_dir.parent / "sharded"))
    sharded = quantized_source(llama)
    files = sorted(sharded.config_dir.glob("model-*.safetensors"))
    assert len(files) > 2 and all(path.stat().st_size < 60_000 for path in files)
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert sharded.module_names
    for name, tensor in whole.items():
        assert torch.equal(sharded.tensor(name), tensor)


def test_refusals(llama: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    with pytest.raises(ModelError, match="int8 or int4, not to 'Q4_K'"):
        quantized_source(llama, "Q4_K")
    source = open_source(llama)
    monkeypatch.setattr(source, "tensor", lambda name: torch.full(source.header(name)[1], torch.inf))
    with pytest.raises(ModelError, match=r"llama: lm_head\.weight: weights are infinite"):
        quantize_source(source, skeleton_of(source), "int8", torch.float32)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 1000})())
    with pytest.raises(ModelError, match=r"needs 0\.0 GB .* set STREAMLLM_CACHE"):
        quantized_source(llama)
    assert not [path for path in cache.iterdir() if path.suffix != ".lock"]


def test_memory_is_bounded(tmp_path: Path, cache: Path) -> None:
    """Twelve matrices of 16 MB, one at a time: mapped, in float32 in pieces, packed."""
    save_tiny("llama-yarn-biases", tmp_path / "tiny")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=1 << 17,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "wide")
    process, result = conversion_processes.start(conversion_processes.measure_quantization, tmp_path / "wide", cache)
    assert result.recv() < 100 << 20
    process.join()


def test_damage_is_named(llama: Path) -> None:
    packed = quantized_source(llama)
    path = packed.config_dir / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ModelError, match=f"delete {packed.config_dir}"):
        quantized_source(llama)
    for old, new in ((b'\\"int4\\"', b'\\"int9\\"'), (b'\\"int4\\"', b'\\"int8\\"')):
        path.write_bytes(whole.replace(old, new, 1))
        with pytest.raises(ModelError, match="packed tensors"):
            quantized_source(llama)
