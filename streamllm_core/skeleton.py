"""The model as transformers builds it, without weights: parameters on the meta device, small buffers real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import MoeModelOutputWithPast

from streamllm_core.architectures import check_supported
from streamllm_core.attention import NAME, PassState
from streamllm_core.errors import ModelError
from streamllm_core.weights import WeightSource


class _Hidden(nn.Module):
    """Stands for the base model inside the CausalLM, so that the model file's own head code runs on given rows."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)  # the head of a MoE looks for router logits


class Skeleton:
    """A transformers CausalLM taken apart: embedding, decoder layers, final norm and head are used one by one."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        with _parameters_on_meta(), no_init_weights():
            self.causal = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME).eval()
        self.causal.tie_weights()  # belongs to the initialisation that was left out
        self.config = config
        self.prefix = self.causal.base_model_prefix
        self.base = getattr(self.causal, self.prefix)
        self.layers: nn.ModuleList = self.base.layers
        self.layers_prefix = f"{self.prefix}.layers."
        self.embedding: nn.Module = self.base.get_input_embeddings()
        self.output: nn.Module = self.causal.get_output_embeddings()
        self.tied = self.output.weight is self.embedding.weight

    def name_of(self, wanted: nn.Module) -> str:
        """The dotted name of a module of the CausalLM."""
        return str(next(name for name, module in self.causal.named_modules() if module is wanted))

    def untie(self) -> None:
        """The checkpoint has a head of its own, whatever the configuration says."""
        self.tied = False

    def attach(self, state: PassState) -> None:
        """Let every attention module find the pass, and the head run apart from the base model."""
        for module in self.layers.modules():
            if hasattr(module, "layer_idx"):
                module.__dict__["rolling"] = state
        # The base model stays reachable as ``self.base``; names in the state dict are not needed any more.
        setattr(self.causal, self.prefix, _Hidden())

    def hidden_states(self, embedded: Tensor) -> Tensor:
        """[1, tokens, hidden] embedded tokens → the same shape behind the final norm."""
        positions = torch.zeros(embedded.shape[:2], dtype=torch.long, device=embedded.device)
        output = self.base(inputs_embeds=embedded, position_ids=positions, use_cache=False)
        return output.last_hidden_state  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → float32 [rows, vocabulary], with bias, scale and softcap as the model has them."""
        output = self.causal(inputs_embeds=hidden[None], use_cache=False)
        return output.logits[0].float()  # type: ignore[no-any-return]

    @contextmanager
    def output_rows(self, weight: Tensor, rows: range) -> Iterator[None]:
        """Inside the block the head is its ``rows`` alone, with ``weight`` [len(rows), hidden]."""
        parameters = self.output._parameters
        whole = dict(parameters)
        parameters["weight"] = nn.Parameter(weight, requires_grad=False)
        if (bias := whole.get("bias")) is not None:
            parameters["bias"] = nn.Parameter(bias[rows.start : rows.stop], requires_grad=False)
        try:
            yield
        finally:
            parameters.update(whole)


def read_config(source: WeightSource) -> Any:
    """The model's configuration. Raises ModelError when it is unreadable or its type is not on the allowlist."""
    try:
        config = AutoConfig.from_pretrained(source.config_dir, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{source.config_dir}/config.json cannot be used: {error}") from error
    check_supported(config)
    return config


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters made inside the block have no storage; buffers (rotary frequencies, embedding scales) do."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
