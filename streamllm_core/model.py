"""AutoModel and StreamingModel: a transformers model whose decoder layers may live outside the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from streamllm_core.architectures import layer_geometries
from streamllm_core.attention import PassState
from streamllm_core.blueprint import Blueprint
from streamllm_core.checkpoint import parameter_count
from streamllm_core.devices import computes_in, resolve_device, resolve_dtype
from streamllm_core.engine import Engine
from streamllm_core.engine_config import EngineConfig, demand, within
from streamllm_core.errors import BudgetError, ModelError
from streamllm_core.fusion import fuse, kernels_for
from streamllm_core.generation import Generation, generate, stream_generate
from streamllm_core.loading import Loader
from streamllm_core.memory.budget import Demand, KVCacheSizingManager
from streamllm_core.memory.limits import parse_bytes
from streamllm_core.memory.machine import sizing_manager
from streamllm_core.memory.plan import MemoryPlan
from streamllm_core.skeleton import Skeleton, read_config
from streamllm_core.weights import WeightSource, open_source, tokenizer_note
from streamllm_core.weights.quantized import quantize_source

LEAST_WINDOW = 64  # tokens; what a model is loaded for at least
TAP_DEPTH = 2 / 3  # hidden states here describe a sentence best


class AutoModel:
    """Entry point with the name that users of StreamLLM expect."""

    @staticmethod
    def from_pretrained(
        name_or_path: str | Path,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        quantize: str | None = None,
        prefetching: bool = True,
        resident_layers: int | str = "auto",
        vram: int | str | None = None,
        ram: int | str | None = None,
        fused: bool = True,
        expected: EngineConfig | None = None,
        revision: str | None = None,
        token: str | None = None,
    ) -> StreamingModel:
        """Load a model from a folder, a GGUF file, a hub id, or the alias ``smollm2``.

        Args:
            device: "auto" takes CUDA if there is a card, else the CPU.
            dtype: "auto" is bf16 on CUDA and on CPUs with AVX512-BF16 or AMX, else float32. On a CPU without units for
                a 16-bit type, weights are rounded to it and computed with in float32, which is several times faster
                than emulating it.
            quantize: "int8" or "int4" packs the layers' weights once and keeps them in the cache folder; they travel
                packed and are expanded on the device. On a card, a GGUF file's blocks travel as they are without it.
            prefetching: transfer the next layer while one computes.
            resident_layers: how many layers stay on the device; "auto" keeps as many as fit.
            vram: the byte budget on the device ("4GB"), a cap for PyTorch's allocator; the CUDA context itself (a few
                hundred MB) comes on top. None takes what is free.
            ram: bytes of RAM for the streamed layers ("16GB"); what has no place there is read from disk in every pass.
                None takes most of what is free.
            fused: one kernel each for norms, gated activations and rotary positions; without it layers run as
                transformers has them. Changes nothing beyond rounding.
            expected: the engine that the memory is to be planned for; one like EngineConfig() if left out.
            revision, token: for the hub.

        Raises ModelError, BudgetError, ValueError.
        """
        place = resolve_device(device)
        number = resolve_dtype(dtype, place)
        if isinstance(resident_layers, str) and resident_layers != "auto":
            raise ValueError(f"resident_layers must be a number or 'auto', not '{resident_layers}'")
        resident = None if isinstance(resident_layers, str) else resident_layers
        if resident is not None and resident < 0:
            raise ValueError(f"resident_layers must be at least 0, not {resident}")
        if ram is not None and place.type == "cpu":
            raise ValueError("ram is for layers on their way to a card; on the CPU the budget is vram")
        manager = sizing_manager(place, number, vram)
        source = open_source(name_or_path, revision=revision, token=token, dtype=number, packed=place.type == "cuda")
        if quantize is not None:
            source = quantize_source(source, Skeleton(read_config(source), number), quantize, number, place)
        return StreamingModel(
            source,
            place,
            number,
            manager,
            resident=resident,
            ram=None if ram is None else parse_bytes(ram),
            expected=expected,
            prefetching=prefetching,
            fused=fused,
        )


class StreamingModel:
    """A causal language model; see ``AutoModel.from_pretrained``.

    Attributes: ``config`` (transformers), ``device``, ``dtype`` (of the computation), ``plan`` (MemoryPlan for the
    engine that was expected), ``streamer`` (counters).
    """

    def __init__(
        self,
        source: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        manager: KVCacheSizingManager,
        *,
        resident: int | None = None,
        ram: int | None = None,
        expected: EngineConfig | None = None,
        prefetching: bool = True,
        fused: bool = True,
    ) -> None:
        """``expected``: the engine that the memory is planned for; another one has to do with what is left."""
        computed = dtype if computes_in(dtype, device) else torch.float32
        blueprint = Blueprint(source, read_config(source), device, computed, rounded_to=dtype)
        self.name = str(source.name)
        self.config = blueprint.config
        self.device = device
        self.dtype = blueprint.dtype
        self.fingerprint: dict[str, object] = source.fingerprint
        self.parameter_count = parameter_count(source)
        self.sizes = blueprint.sizes
        self.manager = manager
        self.plan = self._plan(expected, resident)
        self.state = PassState(tap_layer=max(0, round(self.config.num_hidden_layers * TAP_DEPTH) - 1))
        self._config_dir = Path(source.config_dir)
        self._skeleton = blueprint.skeleton
        self.rotary_module: nn.Module = self._skeleton.base.rotary_emb
        kernels = kernels_for(device, self.dtype) if fused else None
        if kernels is not None:
            fuse(self._skeleton.base, kernels)
        self._loader = Loader(blueprint, self.plan.placement, ram)  # keeps the page-locked arenas
        self._loader.fixed()
        self._head = self._loader.head()
        self.streamer = self._loader.layers(self.state, prefetching=prefetching)
        self._skeleton.attach(self.state)

    def _plan(self, expected: EngineConfig | None, resident: int | None) -> MemoryPlan:
        """For the engine expected; if none is, for as much of the default window as fits."""
        config = within(expected or EngineConfig(), self.trained_context)
        while True:
            try:
                return self.manager.plan(self.sizes, self.demand(config), resident)
            except BudgetError:
                if expected is not None or config.window <= LEAST_WINDOW:
                    raise
            config = replace(config, window=config.window // 2, excursion=config.excursion // 2)

    def demand(self, config: EngineConfig) -> Demand:
        """What an engine wants of the memory."""
        return demand(config, self.config, self.device, self.dtype)

    # --- running ---------------------------------------------------------------------------------------------

    def forward(self, tokens: Sequence[int]) -> Tensor:
        """One pass over the weights for the pass in ``state``: hidden states [tokens, hidden] behind the final norm."""
        self.streamer.begin_pass()
        # Through pageable memory: staged in page-locked memory, reading was 2 to 9 % slower on an H200, presumably
        # because that copy stands in line behind the layers on their way.
        embedded = self._skeleton.embedding(torch.tensor(tokens))[None].to(self.device)
        return self._skeleton.hidden_states(embedded)[0]

    def head(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → float32 logits [rows, vocabulary]."""
        return self._head.logits(hidden)

    @property
    def notes(self) -> list[str]:
        """What the user should know about how the model was loaded: layers that have no place in RAM."""
        registry = self._loader.registry
        return [registry.note] if registry is not None and registry.note else []

    def best(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → the likeliest token of each row, int64 [rows]."""
        return self._head.best(hidden)

    @property
    def bytes_moved(self) -> int:
        """Weights that came over the link until now: layers, and the head where it is streamed."""
        return self.streamer.bytes_moved + self._head.bytes_moved

    def engine(self, config: EngineConfig | None = None) -> Engine:
        """An engine for many texts in flight. Raises WindowError, BudgetError."""
        return Engine(self, config or EngineConfig(), self.manager)

    @property
    def trained_context(self) -> int:
        """Longest context, in tokens, that the model was trained for."""
        return int(self.config.max_position_embeddings)

    @cached_property
    def pins(self) -> bool:
        """Whether any layer keeps pinned tokens; False for models with nothing but native sliding layers."""
        return any(geometry.pins for geometry in layer_geometries(self.config, self.trained_context))

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises ModelError when its folder has none."""
        from transformers import AutoTokenizer

        if not any((self._config_dir / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            note = tokenizer_note(self._config_dir) or f"{self._config_dir} holds no tokenizer files"
            raise ModelError(f"{self.name}: {note}; text cannot be used, only token ids.")
        return AutoTokenizer.from_pretrained(self._config_dir, trust_remote_code=False)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """End-of-sequence tokens, from generation_config.json or config.json."""
        from transformers import GenerationConfig

        eos = self.config.eos_token_id
        if (self._config_dir / "generation_config.json").exists():
            eos = GenerationConfig.from_pretrained(self._config_dir).eos_token_id or eos
        if eos is None:
            return frozenset()
        return frozenset(eos if isinstance(eos, list) else [eos])

    @torch.inference_mode()
    def logits(
        self, input_ids: Tensor, *, sinks: int = 4, window: int | None = None, chunk_tokens: int | None = None
    ) -> Tensor:
        """Next-token logits at every position of ``input_ids`` int64 [batch, T], read ``chunk_tokens`` at a time.

        ``window`` R None shows everything before a token. Returns float32 [batch, T, vocabulary] on the CPU; the
        chunk size does not change it beyond rounding.
        """
        batch, length = input_ids.shape
        chunk = min(chunk_tokens or length, length)
        if window is None or window >= length - 1:  # nothing is evicted: pins would only add to the context claimed
            window, sinks = max(1, length - 1), 0
        config = EngineConfig(
            window=window, sinks=min(sinks, length), streams=batch, pass_tokens=batch * chunk, excursion=0
        )
        engine = Engine(self, config)
        streams = [engine.open(sinks=config.sinks) for _ in range(batch)]
        rows = input_ids.tolist()
        output = torch.empty(batch, length, self.config.vocab_size)
        for start in range(0, length, chunk):
            pieces = [(stream, row[start : start + chunk]) for stream, row in zip(streams, rows, strict=True)]
            hidden = engine.forward(pieces)
            logits = torch.cat([self.head(part).cpu() for part in hidden.split(self.sizes.logit_rows)])
            output[:, start : start + chunk] = logits.view(batch, -1, logits.shape[-1])
        return output

    def generate(self, input_ids: Tensor, **options: Any) -> Tensor | Generation:
        """Continue each row of ``input_ids``; see ``streamllm_core.generation.generate``."""
        return generate(self, input_ids, **options)

    def stream_generate(self, input_ids: Tensor, **options: Any) -> Iterator[str]:
        """Text pieces as they are generated; see ``streamllm_core.generation.stream_generate``."""
        return stream_generate(self, input_ids, **options)
