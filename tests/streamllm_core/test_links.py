"""Links: whatever is late, fails or breaks off, the computation finds in a slot the layer that it waited for."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from random import Random

import pytest
import torch
from torch import Tensor

from streamllm_core.errors import ModelError
from streamllm_core.links import CudaLink, ReaderLink, StagedLink, link_from_host
from streamllm_core.memory.pinned import PinnedHostWeightRegistry
from streamllm_core.memory.scratchpad import GPUScratchpadPool
from tests.conftest import ROOT, command_environment
from tests.streamllm_core.simulated_bus import SimulatedBus, layer_bytes

SIZE = 48
CPU = torch.device("cpu")
Read = Callable[[int, Tensor], None]


class Machine:
    """Streamed layers behind a link over a simulated bus, used in turns as the streamer does."""

    def __init__(
        self,
        layers: int,
        arenas: int,
        buffers: int = 2,
        seed: int = 0,
        read: Read | None = None,
    ) -> None:
        self.bus = SimulatedBus(seed)
        self.sizes = {3 * index + 1: SIZE + index % 3 for index in range(layers)}
        self.pool = GPUScratchpadPool(SIZE + 2, CPU)
        for slot in self.pool.slots:
            slot.fill_(0xFF)
        registry = PinnedHostWeightRegistry(self.bus, limit_bytes=2**40)
        registry.arenas = {layer: registry.allocate(self.sizes[layer]) for layer in list(self.sizes)[:arenas]}
        registry.staging = [registry.allocate(SIZE + 2) for _ in range(buffers)] if arenas < layers else []
        for layer, arena in registry.arenas.items():
            arena.copy_(layer_bytes(layer, self.sizes[layer]))
        self.read_layers: list[int] = []
        from_disk = _reader(self.sizes, self.read_layers, read)
        self.link = (
            CudaLink(self.pool, registry)
            if arenas == layers
            else StagedLink(self.pool, self.sizes, registry, from_disk)
        )
        self.order = list(self.sizes)
        self.turn = 0
        self.wrong: list[int] = []
        self.restart()

    def restart(self) -> None:
        """Go back to the first layer, as after a broken pass."""
        self.turn += -self.turn % (2 * len(self.order))
        for turn in (self.turn, self.turn + 1):
            self.start(turn)

    def start(self, turn: int) -> None:
        self.link.start(self.order[turn % len(self.order)], turn % 2)

    def step(self) -> None:
        """One layer: its slot is waited for, checked by the computation, and filled anew."""
        slot, layer = self.turn % 2, self.order[self.turn % len(self.order)]
        self.link.wait(slot)
        self.bus.compute(lambda: self._check(slot, layer))
        self.link.free(slot)
        self.turn += 1
        self.start(self.turn + 1)

    def _check(self, slot: int, layer: int) -> None:
        size = self.sizes[layer]
        if not torch.equal(self.pool.slots[slot][:size], layer_bytes(layer, size)):
            self.wrong.append(layer)

    def finish(self) -> None:
        self.link.wait(0)
        self.link.wait(1)
        self.bus.synchronize()
        assert not self.wrong


def _slowly(layer: int, block: Tensor) -> None:
    time.sleep(1e-4)


def _reader(sizes: dict[int, int], reads: list[int], meanwhile: Read | None) -> Read:
    def read(layer: int, block: Tensor) -> None:
        block.fill_(0xFF)
        reads.append(layer)
        if meanwhile is not None:
            meanwhile(layer, block)
        block.copy_(layer_bytes(layer, sizes[layer]))

    return read


@pytest.mark.parametrize("buffers", [2, 3, 5])
@pytest.mark.parametrize("arenas", [0, 1, 2])
@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_every_layer_arrives(layers: int, arenas: int, buffers: int) -> None:
    machine = Machine(layers, min(arenas, layers), buffers)
    for _ in range(4 * layers + 3):
        machine.step()
    machine.finish()


def test_a_thousand_random_schedules() -> None:
    """Odd and even numbers of layers, mixes of arenas and disk, passes that break off at any layer."""
    for seed in range(1000):
        random = Random(seed)
        layers = random.randint(1, 7)
        read = random.choice([None, None, None, _slowly])
        machine = Machine(layers, random.randint(0, layers), random.randint(2, 4), seed, read)
        for _ in range(random.randint(1, 4)):
            for _ in range(random.randint(0, 2 * layers)):
                machine.step()
            if random.random() < 0.5:
                machine.restart()
        machine.finish()


def test_each_layer_is_read_once_a_pass_and_ahead_only_into_buffers() -> None:
    machine = Machine(layers=5, arenas=1, buffers=3)
    for _ in range(13):
        machine.step()
    machine.finish()
    started = [machine.order[turn % 5] for turn in range(machine.turn + 2)]
    wanted = Counter(layer for layer in started if layer != machine.order[0])
    found = Counter(machine.read_layers)
    assert not wanted - found
    assert (found - wanted).total() <= 3  # as many as there are buffers


def test_start_never_waits_for_the_disk() -> None:
    gate = threading.Event()

    def blocked(layer: int, block: Tensor) -> None:
        assert gate.wait(60)

    machine = Machine(layers=3, arenas=0, read=blocked)  # has begun with both slots
    gate.set()
    for _ in range(7):
        machine.step()
    machine.finish()


@pytest.mark.parametrize("number", range(8))
def test_a_failed_read_reaches_the_computation_as_it_is_and_the_next_pass_is_whole(number: int) -> None:
    reads = count()

    def failing(layer: int, block: Tensor) -> None:
        if next(reads) == number:
            raise ModelError("model.safetensors: cannot be read")

    machine = Machine(layers=4, arenas=1, read=failing)

    def run() -> None:
        for _ in range(12):
            machine.step()

    with pytest.raises(ModelError, match=r"model\.safetensors"):
        run()
    machine.restart()
    run()
    machine.finish()


def test_a_link_that_is_dropped_ends_its_threads_and_then_gives_its_memory_back() -> None:
    gc.collect()
    before = set(threading.enumerate())
    machine = Machine(layers=4, arenas=1, read=_slowly)
    bus = machine.bus
    machine.step()
    machine.link.wait(1)
    assert len(set(threading.enumerate()) - before) >= 2
    bus.synchronize()
    del machine
    gc.collect()
    assert set(threading.enumerate()) <= before
    assert not bus.locked


EXIT = """
import time, torch
from tests.streamllm_core.test_links import Machine
machine = Machine(layers=4, arenas=1, buffers=4, read=lambda layer, block: time.sleep(0.2))
machine.step()
print("leaving")
"""


def test_a_process_with_reads_under_way_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT], cwd=ROOT, env=command_environment(), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


def test_all_layers_page_locked_need_no_staging() -> None:
    filled: list[int] = []
    registry = PinnedHostWeightRegistry(SimulatedBus(), limit_bytes=10 * SIZE)
    link = link_from_host(GPUScratchpadPool(SIZE, CPU), dict.fromkeys(range(10), SIZE), registry, _append(filled))
    assert isinstance(link, CudaLink)
    assert sorted(filled) == list(range(10))
    assert not registry.staging
    assert not registry.note


def test_layers_beyond_the_limit_come_from_disk() -> None:
    filled: list[int] = []
    registry = PinnedHostWeightRegistry(SimulatedBus(), limit_bytes=6 * SIZE)
    sizes = dict.fromkeys(range(10), SIZE)
    link = link_from_host(GPUScratchpadPool(SIZE, CPU), sizes, registry, _append(filled))
    assert isinstance(link, StagedLink)
    assert filled[: len(registry.arenas)] == list(registry.arenas)


def _append(filled: list[int]) -> Read:
    return lambda layer, block: filled.append(layer)


def test_a_reader_link_fills_slots_in_the_order_asked() -> None:
    filled: list[tuple[int, int]] = []
    link = ReaderLink(lambda layer, slot: filled.append((layer, slot)))
    for turn in range(50):
        link.start(turn, turn % 2)
    link.wait(0)
    link.wait(1)
    assert filled == [(turn, turn % 2) for turn in range(50)]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("layers", [3, 4])
@pytest.mark.parametrize("limit", [0, 4])
def test_a_card_finds_the_layers_that_it_waits_for(layers: int, limit: int) -> None:
    """Slots that a long computation still reads, copies that take their time, and a reader that does, too."""
    from streamllm_core.memory.bus import CudaBus

    size = 2**24
    device = torch.device("cuda", 0)
    pool = GPUScratchpadPool(size, device)
    registry = PinnedHostWeightRegistry(CudaBus(device), limit_bytes=limit * size)
    sizes = dict.fromkeys(range(layers), size)
    wanted = [layer_bytes(layer, size) for layer in sizes]
    link = link_from_host(pool, sizes, registry, _reader(sizes, [], None))
    busy = torch.randn(2048, 2048, device=device)
    for turn in (0, 1):
        link.start(turn % layers, turn % 2)
    copies = []
    for turn in range(5 * layers):
        link.wait(turn % 2)
        for _ in range(turn % 3 * 20):
            busy = busy @ busy / 2048
        copies.append(pool.slots[turn % 2].clone())
        link.free(turn % 2)
        link.start((turn + 2) % layers, turn % 2)
    for turn, copy in enumerate(copies):
        assert torch.equal(copy.cpu(), wanted[turn % layers])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_that_is_not_page_locked_is_refused() -> None:
    from streamllm_core.memory.bus import CudaBus

    bus = CudaBus(torch.device("cuda"))
    with pytest.raises(ValueError, match="not page-locked"):
        bus.copy(torch.empty(8, device="cuda"), torch.empty(8), None)
