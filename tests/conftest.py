"""Fixtures for the whole suite: a tiny model of random weights with a real tokenizer, and the command line."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool>",)

_TRAINING = (
    "The quick brown fox jumps over the lazy dog. Ships left the harbour in the morning with salt, wool and grain. "
    "Sum up the text above; use names and numbers. Notes on the parts of one long document, in order. 0123456789\n"
)


def build_tokenizer() -> Any:
    """A byte-level BPE of 400 tokens with ChatML's control tokens and one added token that is none."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=399, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator([_TRAINING] * 20, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[0], pad_token=SPECIAL[0], clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: a Llama of three layers trained (it says) for 1,024 tokens, and its tokenizer."""
    from tests.streamllm_core.tiny_llama import write_llama

    folder = tmp_path_factory.mktemp("model") / "tiny"
    folder.mkdir()
    tokenizer = build_tokenizer()
    write_llama(folder, vocabulary=len(tokenizer), context=1024)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def summary(self) -> Any:
        """The JSON object that is the last line of stdout."""
        return json.loads(self.out.splitlines()[-1])


def command_environment() -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def batch(tmp_path: Path) -> Callable[..., Outcome]:
    """Runs `streamllm-batch` with the given arguments in a process of its own, in the test's folder."""

    def run(*arguments: object, **options: Any) -> Outcome:
        command = [sys.executable, "-m", "pipeline.cli", *map(str, arguments)]
        done = subprocess.run(
            command, cwd=tmp_path, env=command_environment(), capture_output=True, text=True, timeout=300, **options
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
