"""StreamLLM's own quickstart, word for word, against a hub on this machine that serves a tiny Qwen2 under that id."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, build_tokenizer
from tests.hub_server import HubServer

QUICKSTART = (ROOT / "tests" / "data" / "quickstart.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("qwen2")
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(code: str, hub: HubServer, home: Path) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_on_the_cpu_without_cuda(tiny_qwen2: Path, tmp_path: Path) -> None:
    with HubServer({"Qwen/Qwen2.5-7B-Instruct": tiny_qwen2}) as hub:
        code = QUICKSTART.replace(".cuda()", "")
        output = run(code.replace("prefetching=True", 'prefetching=True, device="cpu"'), hub, tmp_path)
        assert output.startswith("What is the capital of the United States?")
        assert len(output) > len("What is the capital of the United States?\n")
        assert "model.safetensors" in hub.downloaded()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_word_for_word_on_cuda(tiny_qwen2: Path, tmp_path: Path) -> None:
    with HubServer({"Qwen/Qwen2.5-7B-Instruct": tiny_qwen2}) as hub:
        assert run(QUICKSTART, hub, tmp_path).startswith("What is the capital of the United States?")
