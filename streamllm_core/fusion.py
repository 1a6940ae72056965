"""Fused elementwise work for a transformers model: RMS norms, gated activations, rotary positions.

Only leaf modules get another forward, and only where it was seen to agree with their own: each class is probed once
with random weights and inputs, in float32 and in bf16, which tells the orders of rounding apart.
Whatever does not match (LayerNorm, mixtures of experts, other activations) stays as transformers runs it.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from streamllm_core.kernels import elementwise, elementwise_torch
from streamllm_core.kernels.elementwise_torch import Tables
from streamllm_core.rotary import Frequencies, by_layer_type

ROTARY = "apply_rotary_pos_emb"  # what every model file calls the function that rotates queries and keys
HIDDEN, INNER = 8, 12  # sizes of a probed MLP

Forward = Callable[[Tensor], Tensor]


class Kernels(Protocol):
    """What ``kernels.elementwise`` and ``kernels.elementwise_torch`` have in common."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool) -> Tensor: ...

    def gate_(self, gate: Tensor, up: Tensor, activation: str) -> None: ...

    def rotate(
        self, query: Tensor, key: Tensor, window: Tables, sinks: Tables | None, interleaved: bool
    ) -> tuple[Tensor, Tensor, Tensor]: ...


Build = Callable[[Any, Kernels], Forward]  # the fused forward of a module; reads its weights when it is called


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """The kernels for a device; None where stock transformers is to run: without Triton, and in float64, which they
    would round."""
    if dtype == torch.float64:
        return None
    if device.type == "cpu":
        return elementwise_torch
    return elementwise if importlib.util.find_spec("triton") is not None else None


def fuse(base: nn.Module, kernels: Kernels) -> list[str]:
    """Give the norms, MLPs and attention modules of ``base`` their fused forward, where there is one.

    ``base`` is a transformers base model with ``layers`` and ``rotary_emb``; its parameters may be on the meta device
    and may be re-bound later. Returns the names of the modules that changed.
    """
    builds: dict[type, Build | None] = {}
    rotations: dict[type, tuple[FunctionType, bool] | None] = {}
    changed = []
    for name, module in base.named_modules():
        kind = type(module)
        if kind not in builds:
            builds[kind] = _match(module)
            rotations[kind] = _match_rotation(module, base)
        if (build := builds[kind]) is not None:
            module.forward = build(module, kernels)
            changed.append(name)
        if (rotation := rotations[kind]) is not None:
            module.forward = MethodType(rotation[0], module)
            module.fused_rotation = partial(kernels.rotate, interleaved=rotation[1])
            changed.append(name)
    return changed


# --- norms and MLPs --------------------------------------------------------------------------------------------


def _rms_norm(eps_name: str, offset: float, round_first: bool) -> Build:
    def build(module: Any, kernels: Kernels) -> Forward:
        eps = getattr(module, eps_name)
        return lambda x: kernels.rms_norm(x, module.weight, eps, offset, round_first)

    return build


def _gated_mlp(activation: str) -> Build:
    def build(module: Any, kernels: Kernels) -> Forward:
        def forward(x: Tensor) -> Tensor:
            gate = module.gate_proj(x)
            kernels.gate_(gate, module.up_proj(x), activation)
            return module.down_proj(gate)  # type: ignore[no-any-return]

        return forward

    return build


def _joined_mlp(activation: str) -> Build:
    def build(module: Any, kernels: Kernels) -> Forward:
        def forward(x: Tensor) -> Tensor:
            gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
            kernels.gate_(gate, up, activation)
            return module.down_proj(gate)  # type: ignore[no-any-return]

        return forward

    return build


# Output and input size of each product in a probe, and the forwards that may fit.
MLPS: list[tuple[dict[str, tuple[int, ...]], Callable[[str], Build]]] = [
    ({"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}, _gated_mlp),
    ({"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}, _joined_mlp),
]


def _match(module: Any) -> Build | None:
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    if list(parameters) == ["weight"] and weight is not None and weight.ndim == 1:
        if len(weight) > elementwise.WIDEST_NORM:
            return None
        names = [name for name in ("variance_epsilon", "eps") if isinstance(getattr(module, name, None), float)]
        norms = [_rms_norm(name, offset, first) for name in names for offset in (0.0, 1.0) for first in (True, False)]
        return _agreeing(module, norms, {"weight": tuple(weight.shape)}, len(weight), 0.01)
    for sizes, mlp in MLPS:
        shapes = {f"{name}.weight": size for name, size in sizes.items()}
        shapes |= {f"{name}.bias": size[:1] for name, size in sizes.items() if f"{name}.bias" in parameters}
        if parameters.keys() == shapes.keys():
            return _agreeing(module, [mlp("silu"), mlp("gelu_tanh")], shapes, HIDDEN, 1.0)
    return None


def _agreeing(
    module: Any, builds: list[Build], shapes: Mapping[str, tuple[int, ...]], width: int, size: float
) -> Build | None:
    """The first of ``builds`` that gives what the module's own forward gives, for inputs [1, 64, width] of ``size``
    (small ones show a norm's epsilon, large ones the curve of an activation)."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    x = size * (torch.randn(1, 64, width, generator=generator) + 0.3)

    def run(dtype: torch.dtype) -> Tensor:
        return functional_call(module, {name: weight.to(dtype) for name, weight in weights.items()}, (x.to(dtype),))  # type: ignore[no-any-return]

    tolerances = {torch.float32: 1e-6, torch.bfloat16: 3e-4}  # another order of rounding costs 3e-3 in bf16
    with torch.inference_mode():
        expected = {dtype: run(dtype) for dtype in tolerances}
        for build in builds:
            module.forward = build(module, elementwise_torch)
            outputs = {dtype: run(dtype) for dtype in tolerances}
            del module.forward
            if all(_distance(outputs[dtype], expected[dtype]) <= limit for dtype, limit in tolerances.items()):
                return build
    return None


def _distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


# --- rotation --------------------------------------------------------------------------------------------------


def _match_rotation(module: nn.Module, base: Any) -> tuple[FunctionType, bool] | None:
    """An attention class's forward with its rotation left out, and whether neighbouring dimensions make a pair.

    Positions are all zero when the model calls its rotary function (see ``rotary``), so leaving it out changes
    nothing but the attention factor, which the tables then carry.
    """
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
        return None
    interleaved = _pairing(base.rotary_emb, getattr(sys.modules[type(module).__module__], ROTARY))
    if interleaved is None:
        return None
    # The same code over other globals: patching the model file would change stock models in this process.
    scope = {**forward.__globals__, ROTARY: lambda query, key, *_: (query, key)}
    bare = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    bare.__kwdefaults__ = forward.__kwdefaults__
    return bare, interleaved


def _pairing(embedding: Any, apply: Callable[..., tuple[Tensor, Tensor]]) -> bool | None:
    """Whether ``apply`` pairs dimension 2 i with 2 i + 1 (else i with pairs + i); None when it does neither."""
    embedding = copy.deepcopy(embedding)
    layer_type = embedding.config.layer_types[0] if by_layer_type(embedding) else None
    frequencies = Frequencies.of(embedding, 4, layer_type)
    positions = torch.tensor([0, 3, 1000])
    angles = frequencies.angles(positions)
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 2, len(positions), 2 * angles.shape[-1], generator=generator)
    expected = apply(query, key, *frequencies.tables(positions, query.dtype))
    plain = angles.cos().float(), angles.sin().float()
    for interleaved in (False, True):
        turned_query, _, turned_key = elementwise_torch.rotate(query, key, plain, None, interleaved)
        if _distance(turned_query, expected[0]) < 1e-6 and _distance(turned_key, expected[1]) < 1e-6:
            return interleaved
    return None
