"""GGUF files: every value as the gguf package gives it, every logit as the model they were written from."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import conversion_processes
import gguf_models
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGUFReader, GGUFWriter
from gguf.quants import dequantize
from gguf_models import CONFIGS, SHAPE, Q, random_model, stored_values, write_gguf
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from streamllm_core.errors import ModelError
from streamllm_core.weights import gguf_file, open_source
from streamllm_core.weights.gguf_file import GGUFFile
from streamllm_core.weights.gguf_tensors import unpermuted_rows

QUANTISED = [kind for kind, (block, _) in GGML_QUANT_SIZES.items() if block > 1 and kind not in (Q.Q8_1, Q.Q8_K)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STREAMLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(random_model(CONFIGS["llama"]()), path, Q.Q8_0)
    return path


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(2 * 90).reshape(2, 90) % SHAPE["vocab_size"]
    with torch.no_grad():
        result: torch.Tensor = model(ids).logits
    return result


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_the_original_model(name: str, tmp_path: Path) -> None:
    model = random_model(CONFIGS[name]())
    write_gguf(model, tmp_path / "tiny.gguf", Q.Q8_0)
    source = open_source(tmp_path / "tiny.gguf")
    loaded, report = AutoModelForCausalLM.from_pretrained(source.config_dir, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.config.model_type == model.config.model_type
    assert loaded.config.rms_norm_eps == model.config.rms_norm_eps
    assert loaded.config.rope_parameters == pytest.approx(model.config.rope_parameters)
    assert loaded.config.max_position_embeddings == model.config.max_position_embeddings
    assert torch.allclose(logits(loaded), logits(model), atol=2e-6, rtol=0)


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0])
def test_values_are_exact(kind: Q, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "_PIECE_VALUES", 500)  # pieces of a few rows
    model = random_model(CONFIGS["llama with biases"]())
    write_gguf(model, tmp_path / "tiny.gguf", kind)
    source = open_source(tmp_path / "tiny.gguf")
    expected = model.state_dict()
    stored = {Q.F16: torch.float16, Q.BF16: torch.bfloat16}.get(kind, torch.float32)
    assert json.loads((source.config_dir / "config.json").read_text())["dtype"] == str(stored).removeprefix("torch.")
    assert set(source.names()) == set(expected)
    for name in source.names():
        assert source.header(name)[0] == (stored if expected[name].ndim == 2 else torch.float32)
        assert torch.equal(source.tensor(name).float(), expected[name]), name


def test_q4_1_needs_float32(tmp_path: Path) -> None:
    """Why quantised weights are stored in float32: the two narrower types change most of them."""
    model = random_model(CONFIGS["llama"]())
    write_gguf(model, tmp_path / "tiny.gguf", Q.Q4_1)
    weight = model.state_dict()["model.layers.0.mlp.up_proj.weight"]
    for narrow in (torch.bfloat16, torch.float16):
        assert (weight.to(narrow).float() != weight).float().mean() > 0.3


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_every_quantised_type_is_read_as_the_package_does(kind: Q, tmp_path: Path) -> None:
    rows, columns = 48, 512
    block, block_bytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (rows, columns // block * block_bytes), dtype=np.uint8)
    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("one", raw, raw_dtype=kind)
    writer.add_tensor("other", np.ones(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "one.gguf")
    order = np.random.default_rng(1).permutation(rows)
    with np.errstate(all="ignore"):
        try:
            expected = dequantize(raw, kind)
        except NotImplementedError:
            with pytest.raises(ModelError, match=f"one has type {kind.name}"):
                list(file.pieces("one"))
            return
        assert file.tensors["one"].shape == (rows, columns)
        assert np.array_equal(np.concatenate(list(file.pieces("one"))), expected, equal_nan=True)
        assert np.array_equal(np.concatenate(list(file.pieces("one", order))), expected[order], equal_nan=True)
    assert next(file.pieces("other")).tolist() == [1, 1, 1]


def test_header_is_read_as_the_package_does(llama: Path) -> None:
    ours, theirs = GGUFFile(llama), GGUFReader(llama)
    assert {name: t.shape for name, t in ours.tensors.items()} == {
        t.name: tuple(t.shape[::-1].tolist()) for t in theirs.tensors
    }
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = field.contents()
            assert ours.metadata[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)
    for name, values in stored_values(llama).items():
        assert np.array_equal(np.concatenate(list(ours.pieces(name))), values)


def test_rounding_on_request(llama: Path, cache: Path) -> None:
    exact, rounded = open_source(llama), open_source(llama, dtype=torch.bfloat16)
    assert exact.config_dir != rounded.config_dir
    assert exact.fingerprint != rounded.fingerprint
    assert AutoConfig.from_pretrained(rounded.config_dir).dtype == torch.bfloat16
    for name in exact.names():
        assert torch.equal(rounded.tensor(name), exact.tensor(name).to(torch.bfloat16))
    assert open_source(llama, dtype=torch.float32).config_dir == exact.config_dir
    assert len(list(cache.glob("*.lock"))) == 2


def test_converted_once_and_again_when_the_file_changes(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_source(llama)
    monkeypatch.setattr(GGUFFile, "pieces", None)  # the second time, no weight is converted
    start = time.perf_counter()
    again = open_source(llama)
    assert time.perf_counter() - start < 1
    assert (again.config_dir, again.fingerprint) == (first.config_dir, first.fingerprint)
    monkeypatch.undo()
    monkeypatch.setenv("STREAMLLM_CACHE", str(first.config_dir.parent))
    write_gguf(random_model(CONFIGS["llama"](), seed=1), llama, Q.Q8_0)
    changed = open_source(llama)
    assert changed.config_dir != first.config_dir
    assert changed.fingerprint != first.fingerprint


def test_damaged_conversion_says_what_to_delete(llama: Path) -> None:
    folder = open_source(llama).config_dir
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ModelError, match=f"delete {folder}"):
        open_source(llama)


@pytest.mark.parametrize(
    ("architecture", "change", "said"),
    [
        ("gemma3", lambda w: None, "architecture 'gemma3' is not supported"),
        ("llama", lambda w: w.add_expert_count(8), "a mixture of experts"),
        ("llama", lambda w: w.add_uint16("split.count", 3), "llama-gguf-split --merge"),
        ("llama", lambda w: w.add_logit_scale(0.5), "logit_scale 0.5"),
        ("llama", lambda w: w.add_value_length(8), "attention.value_length 8"),
        ("llama", lambda w: w.add_string("llama.rope.scaling.type", "longrope"), "rope scaling 'longrope'"),
        ("llama", lambda w: w.add_tensor("rope_freqs.weight", np.arange(8, dtype=np.float32)), "Llama 3's rule"),
        ("llama", lambda w: w.add_tensor("blk.0.attn_sub_norm.weight", np.ones(8, np.float32)), "attn_sub_norm"),
        ("llama", lambda w: w.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32)), "needs a tensor blk.0.attn_k"),
    ],
)
def test_variants_are_refused_by_name(architecture: str, change: Any, said: str, tmp_path: Path, cache: Path) -> None:
    model = random_model(CONFIGS["llama"]())
    model.config.model_type = architecture
    write_gguf(model, tmp_path / "odd.gguf", extra=change)
    with pytest.raises(ModelError, match=said) as caught:
        open_source(tmp_path / "odd.gguf")
    assert "odd.gguf" in str(caught.value)
    assert not list(cache.glob("*.tmp"))


def test_torn_files_are_named(llama: Path, cache: Path) -> None:
    whole = llama.read_bytes()
    for size in (0, 3, 10, 30, 200, len(whole) // 2, len(whole) - 1):
        llama.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"tiny\.gguf: not a (whole )?GGUF file"):
            open_source(llama)
    llama.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + whole[8:])
    with pytest.raises(ModelError, match="version 9"):
        open_source(llama)
    assert not [path for path in cache.iterdir() if path.suffix != ".lock"]


def test_full_disk_is_said_before_anything_is_written(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 1000})())
    with pytest.raises(ModelError, match=r"needs 0\.0 GB .* set STREAMLLM_CACHE"):
        open_source(llama)


def test_cache_that_cannot_be_written(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STREAMLLM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"cannot write the conversion cache .* set STREAMLLM_CACHE"):
        open_source(llama)


def test_memory_of_a_conversion_is_bounded(llama: Path, tmp_path: Path, cache: Path) -> None:
    config = LlamaConfig(**SHAPE | {"vocab_size": 1_000_000, "num_hidden_layers": 1, "tie_word_embeddings": True})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = model.to_empty(device="cpu").requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    write_gguf(model, tmp_path / "wide.gguf", Q.F16)  # only the size matters: an embedding of 256 MB in float32
    process, result = conversion_processes.start(conversion_processes.measure_conversion, tmp_path / "wide.gguf", cache)
    assert result.recv() < 160 << 20
    process.join()


def wait_for_half_a_conversion(cache: Path) -> Path:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        half = [path for path in cache.glob("*.tmp/model.safetensors") if path.stat().st_size > 0]
        if half:
            return half[0].parent
        time.sleep(0.02)
    raise AssertionError("no conversion began")


def test_killed_half_way(llama: Path, cache: Path) -> None:
    process, _ = conversion_processes.start(conversion_processes.convert_slowly, llama, cache)
    torn = wait_for_half_a_conversion(cache)
    process.kill()
    process.join()
    assert torn.is_dir()
    assert not [path for path in cache.iterdir() if path.is_dir() and path.suffix != ".tmp"]
    source = open_source(llama)
    expected = stored_values(llama)["blk.1.ffn_up.weight"]
    assert np.array_equal(source.tensor("model.layers.1.mlp.up_proj.weight").numpy(), expected)
    assert not torn.exists()


def test_two_processes_at_once(llama: Path, cache: Path) -> None:
    started = [conversion_processes.start(conversion_processes.convert_slowly, llama, cache) for _ in range(2)]
    folders = {result.recv() for _, result in started}
    for process, _ in started:
        process.join()
    assert folders == {open_source(llama).config_dir}
    assert not list(cache.glob("*.tmp"))


def test_two_at_once_where_locks_do_not_work(llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr("streamllm_core.weights.conversion_cache.FileLock.acquire", refuse)
    process, result = conversion_processes.start(conversion_processes.convert_slowly, llama, cache)
    wait_for_half_a_conversion(cache)
    ours = open_source(llama).config_dir  # overtakes the other, which then finds the place taken
    assert result.recv() == ours
    process.join()
    assert not list(cache.glob("*.tmp"))


def test_rows_are_put_back() -> None:
    rows = np.arange(24)
    assert gguf_models.halved(gguf_models.interleaved(rows, 3), 3).tolist() == rows.tolist()
    assert gguf_models.interleaved(rows, 3)[unpermuted_rows(24, 3)].tolist() == rows.tolist()
