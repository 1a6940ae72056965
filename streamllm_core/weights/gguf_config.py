"""config.json and generation_config.json, in transformers' own keys, from the metadata of a GGUF file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamllm_core.errors import ModelError
from streamllm_core.weights.gguf_file import GGUFFile
from streamllm_core.weights.gguf_tensors import ARCHITECTURES, FREQUENCY_FACTORS, CheckpointPlan, plan_checkpoint

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Multipliers of other families that travel under a supported architecture's name; 0 and 1 mean "not used".
_MULTIPLIERS = ("attention.scale", "logit_scale", "embedding_scale", "residual_scale")


@dataclass(frozen=True)
class GGUFModel:
    """A GGUF file read as a model: its configuration and the plan of its checkpoint."""

    file: GGUFFile
    plan: CheckpointPlan
    config: dict[str, Any]
    generation_config: dict[str, Any]


def read_model(file: GGUFFile) -> GGUFModel:
    """Translate the metadata; ModelError, with the file and the key, for a model that cannot be run faithfully."""
    reader = _Metadata(file)
    architecture = reader.architecture
    layers, heads = reader.count("block_count"), reader.count("attention.head_count")
    kv_heads = reader.count("attention.head_count_kv", heads)
    hidden = reader.count("embedding_length")
    head_dim = reader.count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if reader.count(key, head_dim) != head_dim:
            raise reader.refusal(f"{key} {reader.get(key)} differs from the head dimension {head_dim}")
    for key in _MULTIPLIERS:
        if reader.get(key, 0) not in (0, 1):
            raise reader.refusal(f"{key} {reader.get(key)}")
    plan = plan_checkpoint(file, architecture, layers, heads, kv_heads)
    config = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": reader.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": reader.count("context_length"),
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(reader, head_dim),
        "tie_word_embeddings": plan.tied,
    }
    if architecture == "llama":
        config |= {"attention_bias": plan.attention_bias, "mlp_bias": plan.mlp_bias}
    else:
        config["use_sliding_window"] = False
    tokens = {role: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in _TOKEN_KEYS.items()}
    config |= {role: token for role, token in tokens.items() if token is not None}
    # A chat model may end a turn with another token than a text.
    ends = [tokens["eos_token_id"], file.metadata.get("tokenizer.ggml.eot_token_id")]
    stops = list(dict.fromkeys(token for token in ends if token is not None))
    generation = {role: token for role, token in tokens.items() if token is not None}
    if len(stops) > 1:
        generation["eos_token_id"] = stops
    return GGUFModel(file, plan, config, generation)


_TOKEN_KEYS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


class _Metadata:
    """Metadata under the architecture's prefix, with the file named in every error."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{file.path}: GGUF architecture {self.architecture!r} is not supported "
                f"({', '.join(ARCHITECTURES)} are): use the model's safetensors"
            )
        if int(file.metadata.get("split.count", 1)) > 1:
            raise ModelError(f"{file.path}: one part of a split GGUF; join it first with llama-gguf-split --merge")
        if self.get("expert_count", 0):
            raise self.refusal("a mixture of experts")

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            detail = "is missing" if value is None else f"is {value!r}"
            raise ModelError(f"{self.file.path}: {self.architecture}.{key} {detail}, a number is needed")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = int(self.number(key, default))
        if value < 1:
            raise ModelError(f"{self.file.path}: {self.architecture}.{key} is {value}, which is below 1")
        return value

    def refusal(self, what: str) -> ModelError:
        return ModelError(
            f"{self.file.path}: {self.architecture} with {what} is not supported as GGUF: use the model's safetensors"
        )


def _rope(reader: _Metadata, head_dim: int) -> dict[str, Any]:
    theta = reader.number("rope.freq_base", 10000.0)
    kind = reader.get("rope.scaling.type", "none")
    # Files from before scaling types had only this key.
    factor = reader.number("rope.scaling.factor", reader.number("rope.scale_linear", 1.0))
    if FREQUENCY_FACTORS in reader.file.tensors:
        if kind != "none":
            raise reader.refusal(f"both rope scaling {kind!r} and {FREQUENCY_FACTORS}")
        factors = np.concatenate([piece.reshape(-1) for piece in reader.file.pieces(FREQUENCY_FACTORS)])
        return _llama3(reader, theta, head_dim, factors)
    if kind == "yarn":
        parameters: dict[str, Any] = {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": reader.count("rope.scaling.original_context_length"),
        }
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if reader.get(f"rope.scaling.{theirs}") is not None:
                parameters[ours] = reader.number(f"rope.scaling.{theirs}")
        if reader.get("rope.scaling.yarn_log_multiplier", 0):
            raise reader.refusal("rope.scaling.yarn_log_multiplier")
        extra = reader.number("rope.scaling.yarn_attn_factor", reader.number("rope.scaling.attn_factor", 1.0))
        if extra != 1.0:  # on top of the factor that both sides derive by the paper's formula
            parameters["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0)
        return parameters
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "none":
        raise reader.refusal(f"rope scaling {kind!r}")
    return {"rope_type": "default", "rope_theta": theta}


def _llama3(reader: _Metadata, theta: float, head_dim: int, factors: npt.NDArray[np.float32]) -> dict[str, Any]:
    # Llama 3.1 and later: the file holds what its scaling rule gave for each frequency, not the rule's parameters. All
    # published models use 1, 4 and 8192; the rule is run again, so that a file with others is refused, not misread.
    low, high, original, factor = 1.0, 4.0, 8192, float(factors.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise reader.refusal(f"{FREQUENCY_FACTORS} that do not follow Llama 3's rule")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
