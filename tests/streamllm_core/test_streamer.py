"""Layers out of two scratchpads: whatever the number of layers and where a pass ends, no layer meets stale bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from streamllm_core import AutoModel, StreamingModel
from streamllm_core.links import CudaLink, Link, ReaderLink
from streamllm_core.loading import Loader
from streamllm_core.memory.scratchpad import GPUScratchpadPool
from tests.streamllm_core.tiny_engines import SINKS, random_tokens, small_engine
from tests.streamllm_core.tiny_llama import write_llama

HIDDEN, VOCABULARY = 32, 97
# Each tensor of a layer begins at a multiple of 256 bytes: q, o · k, v · gate, up, down · two norms.
LAYER_BYTES = 2 * 32 * 32 * 4 + 2 * 16 * 32 * 4 + 3 * 32 * 48 * 4 + 2 * 256


class HostileLink:
    """Fills a slot with NaN before each transfer, and forgets the transfers whose numbers are in ``dropped``."""

    def __init__(self, link: Link, pool: GPUScratchpadPool, dropped: set[int], poison: bool) -> None:
        self.started: list[tuple[int, int]] = []
        self._link = link
        self._pool = pool
        self._dropped = dropped
        self._poison = poison
        self._nans = torch.full_like(pool.slots[0], 0xFF)
        if self._nans.is_cuda:
            torch.cuda.synchronize()

    def start(self, layer: int, slot: int) -> None:
        if self._poison:
            self._overwrite(slot)
        if len(self.started) not in self._dropped:
            self._link.start(layer, slot)
        self.started.append((layer, slot))

    def _overwrite(self, slot: int) -> None:
        if isinstance(self._link, CudaLink):  # in the order of the transfers, or it would hide a race
            self._link.bus.copy(self._pool.slots[slot], self._nans, self._link.freed[slot])
        else:
            assert isinstance(self._link, ReaderLink)
            filling = self._link._filled[slot]
            if filling is not None:
                filling.exception()
            self._pool.slots[slot].fill_(0xFF)

    def wait(self, slot: int) -> None:
        self._link.wait(slot)

    def free(self, slot: int) -> None:
        self._link.free(slot)


Hostile = Callable[..., StreamingModel]
Resident = Callable[..., list[Tensor]]


@pytest.fixture
def hostile(folders: Callable[[int], Path], device: str, monkeypatch: pytest.MonkeyPatch) -> Hostile:
    """Load a tiny Llama whose transfers go over a HostileLink."""
    link = Loader._link

    def load(layers: int, dropped: set[int] | None = None, poison: bool = True, **options: Any) -> StreamingModel:
        def wrapped(loader: Loader, pool: GPUScratchpadPool) -> Any:
            return HostileLink(link(loader, pool), pool, dropped or set(), poison)

        monkeypatch.setattr(Loader, "_link", wrapped)
        return AutoModel.from_pretrained(folders(layers), device=device, dtype="float32", **options)

    return load


SIZES = ((5, 3), (1, 0), (1, 1), (9, 20), (0, 1))  # tokens of two streams, pass by pass


def passes(model: StreamingModel, sizes: Sequence[tuple[int, int]] = SIZES) -> list[Tensor]:
    """Several passes of different sizes, some followed by the head and some not."""
    engine = small_engine(model)
    first, second = engine.open(sinks=SINKS), engine.open(sinks=SINKS)
    outcome = []
    for number, (one, two) in enumerate(sizes):
        pieces = [(first, random_tokens(one, number)), (second, random_tokens(two, 100 + number))]
        hidden = engine.forward([(stream, tokens) for stream, tokens in pieces if tokens])
        outcome.append(hidden.cpu())
        if number % 3 != 1:
            outcome.append(model.head(hidden).cpu())
    return outcome


def same(outcome: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(outcome, wanted, strict=True))


@pytest.fixture
def resident(load: Callable[..., StreamingModel], device: str) -> Resident:
    """The passes of a model all of whose layers are on the device."""
    return lambda layers, *sizes: passes(load(layers, device), *sizes)


# --- slots -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetching", [True, False])
@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("layers", [3, 4])
def test_streamed_layers_give_what_resident_ones_give(
    hostile: Hostile, resident: Resident, layers: int, kept: int, prefetching: bool
) -> None:
    model = hostile(layers, resident_layers=kept, prefetching=prefetching)
    assert len(model.plan.resident) == kept
    assert len(model.streamer.order) == layers - kept
    assert same(passes(model), resident(layers))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_few_streamed_layers_are_no_exception(hostile: Hostile, resident: Resident, layers: int) -> None:
    """One layer that follows itself from slot to slot; two that never change theirs; one beside resident ones."""
    assert same(passes(hostile(layers, resident_layers=0)), resident(layers))
    assert same(passes(hostile(layers, resident_layers=layers - 1)), resident(layers))


@pytest.mark.parametrize("poison", [True, False])
@pytest.mark.parametrize("dropped", [3, 8])
@pytest.mark.parametrize(("layers", "kept"), [(3, 0), (4, 0), (4, 1)])
def test_a_dropped_transfer_is_noticed(
    hostile: Hostile, resident: Resident, layers: int, kept: int, dropped: int, poison: bool
) -> None:
    """The comparison above is worth something: one missing transfer fails it, with NaN in the slot and without."""
    assert not same(passes(hostile(layers, {dropped}, poison, resident_layers=kept)), resident(layers))


@pytest.mark.parametrize("layers", [3, 4])
def test_the_hostile_link_itself_changes_nothing(hostile: Hostile, resident: Resident, layers: int) -> None:
    assert same(passes(hostile(layers, poison=False, resident_layers=0)), resident(layers))


@pytest.mark.parametrize(("layers", "kept"), [(3, 0), (4, 0), (4, 1), (3, 2)])
def test_layers_come_in_order_and_slots_take_turns(hostile: Hostile, layers: int, kept: int) -> None:
    model = hostile(layers, resident_layers=kept)
    passes(model)
    link = model.streamer.link
    assert isinstance(link, HostileLink)
    order, count = model.streamer.order, len(link.started)
    assert [layer for layer, _ in link.started] == [order[turn % len(order)] for turn in range(count)]
    assert [slot for _, slot in link.started] == [turn % 2 for turn in range(count)]


@pytest.mark.parametrize(("layers", "kept"), [(3, 0), (4, 0), (4, 2), (3, 2), (3, 3)])
@pytest.mark.parametrize("prefetching", [True, False])
def test_bytes_moved_are_counted_exactly(hostile: Hostile, layers: int, kept: int, prefetching: bool) -> None:
    model = hostile(layers, resident_layers=kept, prefetching=prefetching)
    streamed = layers - kept
    ahead = 2 if prefetching and streamed else 0  # the first two of the next pass are on their way
    for number in range(3):
        transfers = number * streamed + ahead
        assert model.streamer.transfers == transfers
        assert model.streamer.bytes_moved == transfers * LAYER_BYTES
        engine = small_engine(model)
        engine.forward([(engine.open(), random_tokens(9))])


def test_two_engines_share_the_slots(hostile: Hostile, resident: Resident) -> None:
    model = hostile(3, resident_layers=0)
    wanted = resident(3)
    one, other = small_engine(model), small_engine(model)
    streams = one.open(sinks=SINKS), other.open(sinks=SINKS)
    for engine, stream in zip((one, other), streams, strict=True):
        engine.forward([(stream, random_tokens(5))])
        engine.forward([(stream, random_tokens(7, 1))])
    assert same(passes(model), wanted)


# --- broken passes ---------------------------------------------------------------------------------------------


@contextmanager
def broken(model: StreamingModel, layer: int, part: str) -> Any:
    """A submodule of a layer raises when it is reached."""
    module = model._skeleton.layers[layer].get_submodule(part)
    hook = module.register_forward_pre_hook(lambda *_: 1 / 0)
    yield
    hook.remove()


@pytest.mark.parametrize("prefetching", [True, False])
@pytest.mark.parametrize(("layers", "kept"), [(3, 0), (4, 0), (4, 1), (1, 0), (3, 3)])
@pytest.mark.parametrize("part", ["input_layernorm", "mlp"])  # before and after the layer's keys are written
def test_a_normal_pass_after_an_abandoned_one(
    hostile: Hostile,
    resident: Resident,
    layers: int,
    kept: int,
    part: str,
    prefetching: bool,
) -> None:
    sizes = ((5, 3), (1, 1))
    model, wanted = hostile(layers, resident_layers=kept, prefetching=prefetching), resident(layers, sizes)
    for layer in range(layers):
        for before in range(2):  # with an odd number of layers the parity flips every pass
            engine = small_engine(model)
            for _ in range(before):
                engine.forward([(engine.open(), [1, 2, 3])])
            with broken(model, layer, part), pytest.raises(ZeroDivisionError):
                engine.forward([(engine.open(), [1, 2, 3])])
            assert same(passes(model, sizes), wanted)


@pytest.mark.parametrize("number", range(6))
def test_a_transfer_that_fails_fails_its_pass_and_no_other(
    load: Callable[..., StreamingModel], folders: Callable[[int], Path], number: int
) -> None:
    """A disk that is away for a moment: the pass raises, the next one finds its layers."""
    model = AutoModel.from_pretrained(folders(4), device="cpu", dtype="float32", resident_layers=0)
    link = model.streamer.link
    assert isinstance(link, ReaderLink)
    sizes = ((5, 3), (1, 1))
    read, calls = link._read, iter(range(100))

    def failing(layer: int, slot: int) -> None:
        if next(calls) == number:
            raise OSError("the disk is away")
        read(layer, slot)

    link._read = failing
    with pytest.raises(OSError, match="away"):
        passes(model, sizes)
    assert same(passes(model, sizes), passes(load(4), sizes))


# --- what streams ----------------------------------------------------------------------------------------------


class ShiftedLayer(modeling_llama.LlamaDecoderLayer):
    """A decoder layer with a persistent buffer in it and another in a submodule; one that is not persistent, too."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.register_buffer("shift", torch.zeros(HIDDEN))
        self.mlp.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        assert isinstance(output, Tensor)
        return output + self.shift * self.mlp.steps * self.scale


@pytest.mark.parametrize("poison", [True, False])
def test_persistent_buffers_stream_like_parameters(
    hostile: Hostile,
    folders: Callable[[int], Path],
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    poison: bool,
) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", ShiftedLayer)
    extra = {}
    for index in range(3):
        extra[f"model.layers.{index}.shift"] = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(index))
        extra[f"model.layers.{index}.mlp.steps"] = torch.tensor([2 + index])
    folder = write_llama(tmp_path, seed=3, extra=extra)

    def load(**options: Any) -> StreamingModel:
        return AutoModel.from_pretrained(folder, device=device, dtype="float32", **options)

    wanted = passes(load(resident_layers=3))
    link = Loader._link
    monkeypatch.setattr(Loader, "_link", lambda loader, pool: HostileLink(link(loader, pool), pool, set(), poison))
    streamed = load(resident_layers=0)
    assert same(passes(streamed), wanted)
    assert not same(passes(load(resident_layers=3)), passes(_plain(folders(3), device)))  # the buffers do matter
    names = {name for name, _ in nn.ModuleList(streamed._skeleton.layers)[0].named_buffers()}
    assert {"shift", "mlp.steps", "scale"} <= names
    assert streamed.streamer.bytes_moved == streamed.streamer.transfers * (LAYER_BYTES + 2 * 256)


def _plain(folder: Path, device: str) -> StreamingModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama, "LlamaDecoderLayer", ShiftedLayer.__mro__[1])
        return AutoModel.from_pretrained(folder, device=device, dtype="float32")


def test_a_model_is_refused_whose_buffers_are_missing(
    folders: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", ShiftedLayer)
    with pytest.raises(Exception, match=r"lacks model\.layers\.0\.mlp\.steps"):
        AutoModel.from_pretrained(folders(3), device="cpu", dtype="float32")
