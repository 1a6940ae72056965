"""GGUF files opened as blocks: the bytes of the file, expanded as the gguf package does, in the checkpoint's order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf_models
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf_models import CONFIGS, SHAPE, Q, random_model, stored_values, write_gguf
from transformers import AutoConfig, LlamaConfig

from streamllm_core.checkpoint import Checkpoint
from streamllm_core.errors import ModelError
from streamllm_core.memory.arena import ArenaLayout
from streamllm_core.quantization import FORMATS, expand
from streamllm_core.skeleton import Skeleton, read_config
from streamllm_core.weights import gguf_blocks, open_source
from streamllm_core.weights.gguf_tensors import unpermuted_rows
from streamllm_core.weights.reading import RangeReader
from streamllm_core.weights.source import FileSource

PLAIN = {Q.F32: torch.float32, Q.F16: torch.float16, Q.BF16: torch.bfloat16}
K_TYPES = [Q.Q4_K, Q.Q5_K, Q.Q6_K]
WIDE = SHAPE | {"hidden_size": 256, "intermediate_size": 512}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STREAMLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(random_model(CONFIGS["llama"]()), path, Q.Q4_1)
    return path


def random_blocks(values: np.ndarray, kind: Q) -> np.ndarray:
    """What a quantizer would give, with random bytes in the place of matrices: the package has none for these types."""
    if kind == Q.F32:
        return values.astype(np.float32)
    block, size = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(values.size)
    return generator.integers(0, 256, (len(values), values.shape[1] // block * size), dtype=np.uint8)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", [*PLAIN, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0], ids=lambda kind: kind.name)
def test_values_are_those_of_the_model(kind: Q, name: str, tmp_path: Path) -> None:
    model = random_model(CONFIGS[name]())
    write_gguf(model, tmp_path / "tiny.gguf", kind)
    source = open_source(tmp_path / "tiny.gguf", packed=True)
    expected = {name: value for name, value in model.state_dict().items() if name in source.names()}
    assert set(source.names()) == set(expected)
    for tensor_name, value in expected.items():
        packed = value.ndim == 2 and kind not in PLAIN
        assert source.format(tensor_name) == (FORMATS[kind.name] if packed else None)
        assert source.header(tensor_name) == (
            PLAIN.get(kind, torch.float32) if value.ndim == 2 else torch.float32,
            tuple(value.shape),
        )
        assert torch.equal(source.tensor(tensor_name).float(), value), tensor_name
        if packed:
            out = torch.full(value.shape, torch.nan)
            expand(FORMATS[kind.name], source.raw(tensor_name), out)
            assert torch.equal(out, value)
        source.release(tensor_name)
        assert torch.equal(source.tensor(tensor_name).float(), value), tensor_name


@pytest.mark.parametrize("kind", K_TYPES, ids=lambda kind: kind.name)
def test_values_of_k_types(kind: Q, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_models, "quantize", random_blocks)
    with np.errstate(all="ignore"):
        write_gguf(random_model(LlamaConfig(**WIDE)), tmp_path / "tiny.gguf", kind)
        stored = stored_values(tmp_path / "tiny.gguf")
    source = open_source(tmp_path / "tiny.gguf", packed=True)
    for name, where, heads in (
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight", None),
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", SHAPE["num_attention_heads"]),
        ("model.embed_tokens.weight", "token_embd.weight", None),
    ):
        expected = stored[where]
        if heads:
            expected = expected[unpermuted_rows(len(expected), heads)]
        assert source.format(name) == FORMATS[kind.name]
        assert np.array_equal(source.tensor(name).numpy(), expected, equal_nan=True), name


def test_checkpoint_passes_blocks_through(llama: Path) -> None:
    source = open_source(llama, packed=True)
    converted = open_source(llama)
    skeleton = Skeleton(read_config(source), torch.float32)
    checkpoint = Checkpoint(source, skeleton, torch.bfloat16)
    prefix = "model.layers.0."
    layout = ArenaLayout.of(Skeleton(read_config(source), torch.float16).layers[0])
    block = torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8)
    for name in checkpoint.names():
        format, exact = checkpoint.format(name), converted.tensor(name)
        if format is not None:
            out = torch.empty(exact.shape)
            expand(format, checkpoint.raw(name), out)
            assert torch.equal(out, exact)
            checkpoint.release(name)
    checkpoint.fill(prefix, layout, block)
    for name, view in layout.stored(block).items():
        exact = converted.tensor(prefix + name)
        packed = checkpoint.format(prefix + name) is not None
        assert torch.equal(view, (exact if packed else exact.to(torch.bfloat16)).to(torch.float16))
    for name, tensor in checkpoint.tensors("model.layers.1.mlp"):
        assert torch.equal(tensor, converted.tensor(name))


def test_only_small_files_are_cached(llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_source(llama, packed=True)
    assert sum(path.stat().st_size for path in first.config_dir.iterdir()) < 10_000
    assert AutoConfig.from_pretrained(first.config_dir).model_type == "llama"
    monkeypatch.setattr(gguf_blocks, "describe", None)  # the second time, nothing is written
    again = open_source(llama, packed=True)
    assert (again.config_dir, again.fingerprint) == (first.config_dir, first.fingerprint)
    monkeypatch.undo()
    monkeypatch.setenv("STREAMLLM_CACHE", str(cache))
    assert open_source(llama).fingerprint != first.fingerprint
    write_gguf(random_model(CONFIGS["llama"](), seed=1), llama, Q.Q4_1)
    assert open_source(llama, packed=True).fingerprint != first.fingerprint


def test_damaged_record_says_what_to_delete(llama: Path) -> None:
    folder = open_source(llama, packed=True).config_dir
    (folder / "conversion.json").write_text("{}")
    with pytest.raises(ModelError, match=f"has no 'sha256'; delete {folder}"):
        open_source(llama, packed=True)


@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K, Q.IQ4_NL, Q.IQ4_XS, Q.IQ2_XXS], ids=lambda kind: kind.name)
def test_other_blocks_are_refused(kind: Q, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(gguf_models, "quantize", random_blocks)
    with np.errstate(all="ignore"):
        write_gguf(random_model(LlamaConfig(**WIDE)), tmp_path / "odd.gguf", kind)
    with pytest.raises(ModelError, match=rf"odd\.gguf: its tensor \S+ has type {kind.name}, .* use a file of Q4_0"):
        open_source(tmp_path / "odd.gguf", packed=True)
    assert not cache.exists()


def test_torn_and_replaced_files_are_named(llama: Path) -> None:
    source = open_source(llama, packed=True)
    whole = llama.read_bytes()
    llama.write_bytes(whole[:-40])
    with pytest.raises(ModelError, match=r"tiny\.gguf: not a whole GGUF file"):
        open_source(llama, packed=True)
    with pytest.raises(ModelError, match=r"tiny\.gguf: its size has changed"):
        source.tensor("model.norm.weight")
    with pytest.raises(ModelError, match="has no tensor nonsense"):
        source.header("nonsense")


def test_many_threads(llama: Path) -> None:
    source = open_source(llama, packed=True)
    expected = {name: source.tensor(name) for name in source.names()}

    def check(name: str) -> bool:
        equal = torch.equal(source.tensor(name), expected[name])
        source.release(name)
        return equal

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, source.names() * 10))


@pytest.mark.parametrize("name", CONFIGS)
def test_ranges_are_the_raw_bytes_where_rows_keep_their_order(name: str, tmp_path: Path) -> None:
    write_gguf(random_model(CONFIGS[name]()), tmp_path / "tiny.gguf", Q.Q8_0)
    source = open_source(tmp_path / "tiny.gguf", packed=True)
    assert isinstance(source, FileSource)
    spans = {tensor: source.range(tensor) for tensor in source.names()}
    assert {tensor for tensor, span in spans.items() if span is None} <= {
        tensor for tensor in spans if "q_proj" in tensor or "k_proj" in tensor
    }
    for tensor, span in spans.items():
        if span is not None:
            block = torch.empty(span.nbytes, dtype=torch.uint8)
            RangeReader().read([(span, block)])
            assert torch.equal(block, source.raw(tensor))
