"""Page-locked arenas: exactly sized, as many as the limit and the system allow, given back with their registry."""

from __future__ import annotations

import itertools

import pytest
import torch

from streamllm_core.errors import BudgetError
from streamllm_core.memory.bus import CudaBus
from streamllm_core.memory.pinned import PinnedHostWeightRegistry
from tests.streamllm_core.simulated_bus import SimulatedBus

SIZE = 1000


def placed(layers: int, limit: int, lockable: int = 2**62, staging: int = 0) -> PinnedHostWeightRegistry:
    registry = PinnedHostWeightRegistry(SimulatedBus(lockable=lockable), limit_bytes=limit)
    registry.place(dict.fromkeys(range(layers), SIZE), staging)
    return registry


def test_everything_fits() -> None:
    registry = placed(10, 10 * SIZE)
    assert sorted(registry.arenas) == list(range(10))
    assert {arena.numel() for arena in registry.arenas.values()} == {SIZE}
    assert registry.nbytes == 10 * SIZE
    assert not registry.staging
    assert not registry.note


def test_the_limit_counts_arenas_and_staging_buffers(caplog: pytest.LogCaptureFixture) -> None:
    registry = placed(16, 10 * SIZE, staging=2 * SIZE)
    assert sorted(registry.arenas) == list(range(0, 16, 2))
    assert len(registry.staging) == 2
    assert registry.nbytes == 10 * SIZE
    assert "8 of 16 streamed layers" in registry.note
    assert "the limit is" in registry.note
    assert [record.getMessage() for record in caplog.records] == [registry.note]


@pytest.mark.parametrize("limit", range(2, 40))
def test_arenas_are_spread_evenly(limit: int) -> None:
    held = sorted(placed(40, limit * SIZE).arenas)
    assert len(held) == limit - 2
    gaps = [after - before for before, after in itertools.pairwise(held)]
    assert not gaps or max(gaps) <= 2 * min(gaps)


def test_no_ram_at_all_still_gives_two_staging_buffers() -> None:
    registry = placed(5, 0)
    assert not registry.arenas
    assert len(registry.staging) == 2


def test_staging_takes_what_it_is_given_and_no_more_than_there_are_layers() -> None:
    assert len(placed(9, 0, staging=4 * SIZE + 1).staging) == 4
    assert len(placed(3, 0, staging=100 * SIZE).staging) == 3


def test_a_refusal_by_the_system_ends_in_staging() -> None:
    """Arenas that were locked before it give way to the staging buffers."""
    registry = placed(8, 100 * SIZE, lockable=5 * SIZE, staging=2 * SIZE)
    assert len(registry.arenas) == 3
    assert len(registry.staging) == 2
    assert registry.nbytes == 5 * SIZE
    assert "the system refused to page-lock more" in registry.note
    assert "ulimit -l" in registry.note


def test_fewer_staging_buffers_are_better_than_none() -> None:
    registry = placed(8, 100 * SIZE, lockable=2 * SIZE, staging=5 * SIZE)
    assert not registry.arenas
    assert len(registry.staging) == 2


@pytest.mark.parametrize("lockable", [0, SIZE])
def test_no_room_for_two_staging_buffers(lockable: int) -> None:
    with pytest.raises(BudgetError, match=r"two page-locked buffers.*ulimit -l"):
        placed(8, 100 * SIZE, lockable=lockable)


def test_layers_of_different_sizes() -> None:
    registry = PinnedHostWeightRegistry(SimulatedBus(), limit_bytes=3000)
    registry.place({0: 900, 1: 100, 2: 900, 3: 900, 4: 900}, 0)
    assert {layer: arena.numel() for layer, arena in registry.arenas.items()} == {0: 900}
    assert [buffer.numel() for buffer in registry.staging] == [900, 900]


def test_the_memory_is_unlocked_with_the_registry() -> None:
    bus = SimulatedBus()
    registry = PinnedHostWeightRegistry(bus, limit_bytes=4 * SIZE)
    registry.place(dict.fromkeys(range(8), SIZE), 0)
    assert bus.locked
    del registry
    assert not bus.locked


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_page_locked_arenas_are_unlocked_with_their_registry() -> None:
    registry = PinnedHostWeightRegistry(CudaBus(torch.device("cuda")))
    blocks = [registry.allocate(size) for size in (1, 4096, 1_000_001)]
    assert all(block.is_pinned() for block in blocks)
    assert registry.nbytes == 1 + 4096 + 1_000_001
    del registry
    assert not any(block.is_pinned() for block in blocks)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_refusal_leaves_no_cuda_error_behind() -> None:
    bus = CudaBus(torch.device("cuda"))
    block = torch.empty(8192, dtype=torch.uint8)
    assert bus.lock(block)
    assert not bus.lock(block)  # locked already
    assert torch.ones(3, device="cuda").sum().item() == 3
    bus.unlock(block)
