"""AutoModel and StreamingModel: a transformers model whose decoder layers may live outside the device."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from streamllm_core.architectures import layer_geometries
from streamllm_core.attention import PassState
from streamllm_core.checkpoint import Checkpoint, parameter_count
from streamllm_core.engine import LOGIT_ROWS, Engine, EngineConfig
from streamllm_core.errors import ModelError
from streamllm_core.fusion import fuse, kernels_for
from streamllm_core.generation import Generation, generate, stream_generate
from streamllm_core.memory.arena import ArenaLayout
from streamllm_core.memory.budget import KVCacheSizingManager, MemoryPlan, free_bytes, parse_bytes
from streamllm_core.memory.pinned import PinnedHostWeightRegistry
from streamllm_core.memory.scratchpad import GPUScratchpadPool
from streamllm_core.skeleton import Skeleton, read_config
from streamllm_core.streamer import CudaLink, LayerStreamer, Link, ReaderLink
from streamllm_core.weights import open_source, tokenizer_note

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
TAP_DEPTH = 2 / 3  # hidden states here describe a sentence best


class AutoModel:
    """Entry point with the name that users of StreamLLM expect."""

    @staticmethod
    def from_pretrained(
        name_or_path: str | Path,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        prefetching: bool = True,
        resident_layers: int | str = "auto",
        vram: int | str | None = None,
        fused: bool = True,
        revision: str | None = None,
        token: str | None = None,
    ) -> StreamingModel:
        """Load a model from a folder, a GGUF file, a hub id, or the alias ``smollm2``.

        Args:
            device: "auto" takes CUDA if there is a card, else the CPU.
            dtype: "auto" is bf16 on CUDA and on CPUs with AVX512-BF16 or AMX, else float32. On a CPU without units for
                a 16-bit type, weights are rounded to it and computed with in float32, which is several times faster
                than emulating it.
            prefetching: transfer the next layer while one computes.
            resident_layers: how many layers stay on the device; "auto" keeps as many as fit.
            vram: the byte budget on the device ("4GB"); None takes what is free.
            fused: one kernel each for norms, gated activations and rotary positions; without it layers run as
                transformers has them. Changes nothing beyond rounding.
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
        budget = parse_bytes(vram) if vram is not None else free_bytes(place)
        source = open_source(name_or_path, revision=revision, token=token, dtype=number)
        return StreamingModel(source, place, number, budget, resident, prefetching=prefetching, fused=fused)


def resolve_device(device: str | torch.device) -> torch.device:
    """Raises ValueError when CUDA is asked for and absent, or the device is of another kind."""
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(device)):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda[:n]', not '{device}'")
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but PyTorch sees no CUDA device; use --device cpu")
    return torch.device("cuda", place.index or 0) if place.type == "cuda" else place


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Raises ValueError for a name that is not a supported dtype."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        return torch.bfloat16 if computes_in(torch.bfloat16, device) else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be 'auto', {', '.join(DTYPES)}; not '{dtype}'")
    return DTYPES[dtype]


def computes_in(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device multiplies matrices of ``dtype`` faster than float32 ones."""
    if device.type == "cuda" or dtype.itemsize >= 4:
        return True
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.cpu._is_amx_fp16_supported()


class StreamingModel:
    """A causal language model; see ``AutoModel.from_pretrained``.

    Attributes: ``config`` (transformers), ``device``, ``dtype`` (of the computation), ``plan`` (MemoryPlan),
    ``streamer`` (counters).
    """

    def __init__(
        self,
        source: Any,
        device: torch.device,
        dtype: torch.dtype,
        budget: int,
        resident: int | None,
        *,
        prefetching: bool = True,
        fused: bool = True,
    ) -> None:
        self.name = str(source.name)
        self.config = read_config(source)
        self.device = device
        self.dtype = dtype if computes_in(dtype, device) else torch.float32
        self.fingerprint: dict[str, object] = source.fingerprint
        self.parameter_count = parameter_count(source)
        self.state = PassState()
        self._config_dir = Path(source.config_dir)
        self._skeleton = Skeleton(self.config, self.dtype)
        self.rotary_module: nn.Module = self._skeleton.base.rotary_emb
        kernels = kernels_for(self.device, self.dtype) if fused else None
        if kernels is not None:
            fuse(self._skeleton.base, kernels)
        checkpoint = Checkpoint(source, self._skeleton, rounded_to=dtype)
        self.state.tap_layer = max(0, round(self.config.num_hidden_layers * TAP_DEPTH) - 1)
        layouts = [ArenaLayout.of(layer) for layer in self._skeleton.layers]
        fixed = self._load_fixed(checkpoint)
        self.plan: MemoryPlan = KVCacheSizingManager(budget).place_layers(
            [layout.nbytes for layout in layouts], fixed, resident
        )
        self._registry = PinnedHostWeightRegistry()
        self.streamer = self._load_layers(checkpoint, layouts, prefetching)
        self._skeleton.attach(self.state)

    # --- loading ---------------------------------------------------------------------------------------------

    def _load_fixed(self, checkpoint: Checkpoint) -> int:
        """Embedding (in RAM), final norm and head (on the device); the bytes they take on the device."""
        skeleton = self._skeleton
        used = 0
        for name in checkpoint.names():
            if name.startswith(skeleton.layers_prefix):
                continue
            for full, tensor in checkpoint.tensors(name):
                path, _, leaf = full.rpartition(".")
                owner = skeleton.causal.get_submodule(path)
                place = torch.device("cpu") if owner is skeleton.embedding else self.device
                value = torch.empty_like(tensor, dtype=self.dtype, device=place).copy_(tensor)
                if leaf in owner._parameters:
                    owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
                else:
                    owner._buffers[leaf] = value
                used += value.nbytes if place == self.device else 0
        if skeleton.tied:
            shared = skeleton.embedding._parameters["weight"].to(self.device)  # type: ignore[union-attr]
            skeleton.output._parameters["weight"] = nn.Parameter(shared, requires_grad=False)
            used += shared.nbytes if self.device.type != "cpu" else 0
        for module in skeleton.causal.modules():
            if module is not skeleton.embedding:
                for name, buffer in module._buffers.items():
                    module._buffers[name] = buffer.to(self.device) if buffer is not None else None
        return used

    def _load_layers(self, checkpoint: Checkpoint, layouts: list[ArenaLayout], prefetching: bool) -> LayerStreamer:
        skeleton, device = self._skeleton, self.device
        streamed = {index: layout for index, layout in enumerate(layouts) if index not in self.plan.resident}
        for index in self.plan.resident:
            block = torch.empty(layouts[index].nbytes, dtype=torch.uint8, device=device)
            views = layouts[index].views(block)
            checkpoint.fill(f"{skeleton.layers_prefix}{index}.", views)
            layouts[index].bind(skeleton.layers[index], views)
        pool = link = None
        if streamed:
            pool = GPUScratchpadPool(max(layout.nbytes for layout in streamed.values()), device)
            link = self._link(checkpoint, streamed, pool)
        return LayerStreamer(skeleton.layers, streamed, pool, link, self.state, prefetching=prefetching)

    def _link(self, checkpoint: Checkpoint, streamed: dict[int, ArenaLayout], pool: GPUScratchpadPool) -> Link:
        prefix = self._skeleton.layers_prefix
        if self.device.type == "cuda":
            arenas = {index: self._registry.allocate(layout.nbytes) for index, layout in streamed.items()}
            for index, arena in arenas.items():
                checkpoint.fill(f"{prefix}{index}.", streamed[index].views(arena))
            return CudaLink(pool, arenas)

        def read(index: int, slot: int) -> None:
            checkpoint.fill(f"{prefix}{index}.", streamed[index].views(pool.slots[slot]))

        return ReaderLink(read)

    # --- running ---------------------------------------------------------------------------------------------

    def forward(self, tokens: Sequence[int]) -> Tensor:
        """One pass over the weights for the pass in ``state``: hidden states [tokens, hidden] behind the final norm."""
        self.streamer.begin_pass()
        ids = torch.tensor(tokens)
        embedded = self._skeleton.embedding(ids)[None].to(self.device)
        return self._skeleton.hidden_states(embedded)[0]

    def head(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → float32 logits [rows, vocabulary]."""
        return self._skeleton.logits(hidden)

    def engine(self, config: EngineConfig | None = None) -> Engine:
        """An engine for many texts in flight. Raises WindowError, BudgetError."""
        return Engine(self, config or EngineConfig(), self.plan.left)

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
            logits = torch.cat([self.head(part).cpu() for part in hidden.split(LOGIT_ROWS)])
            output[:, start : start + chunk] = logits.view(batch, -1, logits.shape[-1])
        return output

    def generate(self, input_ids: Tensor, **options: Any) -> Tensor | Generation:
        """Continue each row of ``input_ids``; see ``streamllm_core.generation.generate``."""
        return generate(self, input_ids, **options)

    def stream_generate(self, input_ids: Tensor, **options: Any) -> Iterator[str]:
        """Text pieces as they are generated; see ``streamllm_core.generation.stream_generate``."""
        return stream_generate(self, input_ids, **options)
