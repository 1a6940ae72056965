"""The rings: which row holds which token, what stays for a rewind, and what a slot costs."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

import pytest
import torch

from streamllm_core import NoFreeStream, Stream, StreamLLMError, WindowError
from streamllm_core.architectures import LayerGeometry
from streamllm_core.cache import MAX_HOLES, RollingCache
from streamllm_core.layout import MicroBatch, Run
from streamllm_core.ring import RingLayer

CPU = torch.device("cpu")
ROLLING, SLIDING = LayerGeometry(True, 12), LayerGeometry(False, 5, "sliding_attention")


def make_cache(geometries: Sequence[LayerGeometry] = (ROLLING, SLIDING), **sizes: int) -> RollingCache:
    numbers = {"slots": 3, "max_sinks": 4, "headroom": 6, "kv_heads": 1, "head_dim": 2} | sizes
    return RollingCache(list(geometries), **numbers, dtype=torch.float32, device=CPU)


def append(cache: RollingCache, stream: Stream, count: int) -> None:
    """``count`` tokens whose keys are their own positions."""
    cache.reserve([(stream, range(count))])
    batch = MicroBatch([Run(stream.slot, 0, count, stream.length, stream.sinks)], 0, CPU)
    positions = torch.arange(stream.length, stream.length + count).float()
    keys = positions[:, None, None].expand(count, *cache.layers[0].keys.shape[1::2])
    for layer in cache.layers:
        layer.write(batch, keys.transpose(0, 1), -keys.transpose(0, 1))
    stream.length += count
    stream.last_hidden = keys[-1, 0]


def labels(layer: RingLayer, stream: Stream, rows: int) -> torch.Tensor:
    sinks = torch.tensor([[layer.sinks(stream.sinks)]])
    return layer.labels(sinks, torch.tensor([[stream.length - 1]]), rows)[0]


def held(layer: RingLayer, stream: Stream) -> list[int]:
    """What the rows of a stream's slot hold, read from the keys themselves."""
    return [int(key) for key in layer.keys[stream.slot, 0, :, 0]]


# --- rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(25))
def test_labels_say_what_rows_hold(seed: int) -> None:
    chance = random.Random(seed)
    cache = make_cache([LayerGeometry(True, chance.randint(1, 12)), LayerGeometry(False, chance.randint(1, 12))])
    stream = cache.open(chance.randint(0, 4))
    for _ in range(30):
        append(cache, stream, chance.randint(1, cache.headroom))
        for layer in cache.layers:
            rows, all_rows = layer.used(stream.sinks, stream.length), layer.keys.shape[2]
            unwritten = all_rows - rows  # which a slot with fewer pinned tokens than others has for ever
            assert labels(layer, stream, all_rows).tolist() == held(layer, stream)[:rows] + [-1] * unwritten
            assert held(layer, stream)[rows:] == [0] * unwritten


@pytest.mark.parametrize("seed", range(25))
def test_the_whole_window_is_there_for_every_query_of_a_chunk(seed: int) -> None:
    """R tokens before the first query of a chunk survive the chunk's own keys, if it is not longer than H."""
    chance = random.Random(seed)
    cache = make_cache([LayerGeometry(True, chance.randint(1, 12))])
    (layer,) = cache.layers
    stream = cache.open(chance.randint(0, 4))
    for _ in range(20):
        first = stream.length
        append(cache, stream, chance.choice([1, cache.headroom]))
        wanted = {*range(min(stream.sinks, first)), *range(max(stream.sinks, first - layer.recent), stream.length)}
        assert wanted <= set(held(layer, stream))


def test_logical_rows_list_the_pinned_then_the_last_window_oldest_first() -> None:
    cache = make_cache()
    rolling, sliding = cache.layers
    stream = cache.open(3)
    for length in range(1, 60):
        append(cache, stream, 1)
        keys = rolling.keys[stream.slot, 0, rolling.logical_rows(3, length), 0].tolist()
        assert keys == [*range(min(3, length)), *range(max(3, length - 12), length)]
        keys = sliding.keys[stream.slot, 0, sliding.logical_rows(3, length), 0].tolist()
        assert keys == [*range(max(0, length - 5), length)]


def test_positions_far_beyond_int32_have_rows() -> None:
    cache = make_cache()
    stream = cache.open(4)
    stream.length = 2**40
    append(cache, stream, 3)
    for layer in cache.layers:
        rows = layer.used(4, stream.length)
        label = labels(layer, stream, rows)
        assert {2**40, 2**40 + 1, 2**40 + 2} <= set(label.tolist())


def test_memory_is_what_the_formula_says_and_never_grows() -> None:
    cache = make_cache(slots=5, kv_heads=2, head_dim=8)
    per_row = 2 * 2 * 8 * 4
    assert sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values)) == 5 * per_row * (
        (4 + 12 + 6) + (5 + 6)
    )


# --- slots -----------------------------------------------------------------------------------------------------


def test_slots_are_given_out_and_taken_back() -> None:
    cache = make_cache()
    streams = [cache.open(0) for _ in range(3)]
    assert [stream.slot for stream in streams] == [0, 1, 2]
    assert cache.free_slots == 0
    with pytest.raises(NoFreeStream, match="3 stream slots"):
        cache.open(0)
    with pytest.raises(NoFreeStream, match="3 stream slots"):
        cache.fork(streams[0])
    cache.close(streams[1])
    assert cache.free_slots == 1
    assert cache.fork(streams[0]).slot == 1


def test_a_refused_open_takes_no_slot() -> None:
    cache = make_cache()
    with pytest.raises(WindowError, match=r"5 tokens.*only 4"):
        cache.open(5)
    assert cache.free_slots == 3


def test_a_closed_stream_can_do_nothing_more() -> None:
    """Its slot is -1, and row -1 of a tensor is somebody else's."""
    cache = make_cache()
    stream = cache.open(0)
    append(cache, stream, 5)
    cache.close(stream)
    uses = [
        lambda: cache.close(stream),
        lambda: cache.fork(stream),
        lambda: cache.snapshot(stream),
        lambda: cache.evict(stream, 1, 2),
        lambda: cache.reserve([(stream, [1])]),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="closed"):
            use()
    assert cache.free_slots == 3


def test_nothing_of_a_slots_last_stream_is_left() -> None:
    cache = make_cache()
    for layer in cache.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    slot = cache.open(2).slot
    assert all(not layer.keys[slot].any() and not layer.values[slot].any() for layer in cache.layers)


# --- mark and rewind -------------------------------------------------------------------------------------------


def test_mark_and_rewind_allocate_nothing() -> None:
    cache = make_cache([LayerGeometry(True, 1024)], headroom=512, kv_heads=4, head_dim=64)
    stream = cache.open(4)
    append(cache, stream, 512)
    where = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    stream.rewind(stream.mark())  # whatever Python caches at the first call
    tracemalloc.start()
    for _ in range(100):
        mark = stream.mark()
        stream.rewind(mark)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1000  # the Mark itself: three references
    assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers] == where


def test_rewind_brings_back_length_holes_and_last_hidden() -> None:
    cache = make_cache()
    stream = cache.open(1)
    append(cache, stream, 6)
    cache.evict(stream, 2, 3)
    before = stream.length, stream.holes, stream.last_hidden
    mark = stream.mark()
    append(cache, stream, 6)
    cache.evict(stream, 4, 8)
    stream.rewind(mark)
    assert (stream.length, stream.holes) == before[:2]
    assert stream.last_hidden is before[2]
    assert stream.marked is None


def test_excursions_do_not_nest() -> None:
    stream = make_cache().open(0)
    mark = stream.mark()
    with pytest.raises(ValueError, match="excursion already"):
        stream.mark()
    stream.rewind(mark)
    stream.rewind(stream.mark())


def test_a_mark_serves_once_and_only_its_own_stream() -> None:
    cache = make_cache()
    stream, other = cache.open(0), cache.open(0)
    append(cache, stream, 3)
    mark = stream.mark()
    stream.rewind(mark)
    append(cache, stream, 6)
    other.mark()
    for wrong in (stream, other):
        with pytest.raises(ValueError, match="no open excursion"):
            wrong.rewind(mark)
    assert stream.length == 9


@pytest.mark.parametrize("length", [0, 1, 3, 4, 15, 16, 17, 18, 22, 23, 40, 41, 100])
def test_an_excursion_as_long_as_the_headroom_overwrites_nothing_visible(length: int) -> None:
    cache = make_cache()
    stream = cache.open(4)
    for _ in range(length):
        append(cache, stream, 1)
    mark = stream.mark()
    append(cache, stream, 4)
    append(cache, stream, cache.headroom - 4)
    with pytest.raises(WindowError, match=r"excursion of 7 tokens exceeds the 6"):
        cache.reserve([(stream, [1])])
    stream.rewind(mark)
    for layer in cache.layers:
        first = layer.sinks(4)
        wanted = {*range(min(first, length)), *range(max(first, length - layer.recent), length)}
        assert wanted <= set(held(layer, stream))
    cache.reserve([(stream, range(1000))])  # no excursion, no limit


@pytest.mark.parametrize(("tokens", "lost"), [(6, False), (7, True)])
def test_a_pass_that_broke_off_costs_a_stream_only_if_it_overwrote_its_window(tokens: int, lost: bool) -> None:
    cache = make_cache()
    stream = cache.open(2)
    for _ in range(5):
        append(cache, stream, 6)
    fork = cache.fork(stream)
    cache.reserve([(stream, range(tokens))])  # … and then nothing more is heard of this pass
    uses = [
        lambda: cache.reserve([(stream, [1])]),
        lambda: cache.snapshot(stream),
        lambda: cache.evict(stream, 20, 22),
        lambda: cache.close(cache.fork(stream)),
    ]
    for use in uses:
        if lost:
            with pytest.raises(StreamLLMError, match="lost"):
                use()
        else:
            use()
    cache.snapshot(fork)
    cache.close(stream)
    assert cache.free_slots == 2


# --- eviction --------------------------------------------------------------------------------------------------


@pytest.fixture
def evicting() -> tuple[RollingCache, Stream]:
    cache = make_cache([LayerGeometry(True, 100), SLIDING])
    stream = cache.open(4)
    for _ in range(20):
        append(cache, stream, 5)
    return cache, stream


@pytest.mark.parametrize(
    ("spans", "holes"),
    [
        ([(10, 12), (20, 22)], ((10, 12), (20, 22))),
        ([(20, 22), (10, 12)], ((10, 12), (20, 22))),
        ([(10, 12), (12, 14)], ((10, 14),)),
        ([(12, 14), (10, 12)], ((10, 14),)),
        ([(10, 20), (12, 14)], ((10, 20),)),
        ([(12, 14), (10, 20)], ((10, 20),)),
        ([(10, 15), (12, 20)], ((10, 20),)),
        ([(10, 12), (14, 16), (11, 15)], ((10, 16),)),
        ([(4, 100)], ((4, 100),)),
    ],
)
def test_evicted_spans_merge(
    evicting: tuple[RollingCache, Stream], spans: list[tuple[int, int]], holes: tuple[tuple[int, int], ...]
) -> None:
    cache, stream = evicting
    for span in spans:
        cache.evict(stream, *span)
    assert stream.holes == holes


@pytest.mark.parametrize("span", [(3, 6), (0, 2), (50, 50), (60, 50), (99, 101), (-5, 5), (200, 300)])
def test_spans_outside_the_stream_or_in_its_sinks_are_refused(
    evicting: tuple[RollingCache, Stream], span: tuple[int, int]
) -> None:
    cache, stream = evicting
    cache.evict(stream, 10, 12)
    with pytest.raises(ValueError, match="cannot evict"):
        cache.evict(stream, *span)
    assert stream.holes == ((10, 12),)


def test_a_ninth_hole_is_refused_and_changes_nothing(evicting: tuple[RollingCache, Stream]) -> None:
    cache, stream = evicting
    for number in range(MAX_HOLES):
        cache.evict(stream, 10 + 4 * number, 12 + 4 * number)
    eight = stream.holes
    assert len(eight) == MAX_HOLES == 8
    with pytest.raises(ValueError, match="more than 8"):
        cache.evict(stream, 90, 91)
    assert stream.holes == eight
    cache.evict(stream, 12, 14)  # joins two
    cache.evict(stream, 90, 91)
    assert len(stream.holes) == 8


def test_a_hole_that_has_left_the_window_does_not_count(evicting: tuple[RollingCache, Stream]) -> None:
    cache, stream = evicting
    for number in range(MAX_HOLES):
        cache.evict(stream, 10 + 4 * number, 12 + 4 * number)
    for _ in range(12):  # length 112: token 12 and later are in the window of the next one
        append(cache, stream, 1)
    cache.evict(stream, 105, 106)
    assert stream.holes[0] == (14, 16)
    assert stream.holes[-1] == (105, 106)
    assert len(stream.holes) == 8


def test_a_fork_has_holes_of_its_own(evicting: tuple[RollingCache, Stream]) -> None:
    cache, stream = evicting
    cache.evict(stream, 10, 12)
    fork = cache.fork(stream)
    cache.evict(fork, 20, 22)
    cache.evict(stream, 30, 32)
    assert fork.holes == ((10, 12), (20, 22))
    assert stream.holes == ((10, 12), (30, 32))


# --- snapshots -------------------------------------------------------------------------------------------------


def test_a_snapshot_has_a_constant_size_once_the_window_is_full() -> None:
    cache = make_cache()
    stream = cache.open(4)
    shapes = []
    for _ in range(60):
        append(cache, stream, 1)
        shapes.append({name: tuple(tensor.shape) for name, tensor in cache.snapshot(stream).items()})
    assert shapes[15:] == [shapes[-1]] * 45
    assert shapes[-1]["keys.0"] == (1, 4 + 12, 2)
    assert shapes[-1]["values.1"] == (1, 5, 2)  # a sliding layer pins nothing


def test_a_snapshot_is_a_copy_in_logical_order() -> None:
    cache = make_cache()
    stream = cache.open(4)
    for _ in range(50):
        append(cache, stream, 1)
    tensors = cache.snapshot(stream)
    append(cache, stream, 6)
    assert tensors["keys.0"][0, :, 0].tolist() == [*range(4), *range(38, 50)]
    assert tensors["values.1"][0, :, 0].tolist() == [-45, -46, -47, -48, -49]


def test_a_stream_on_an_excursion_cannot_be_saved() -> None:
    cache = make_cache()
    stream = cache.open(0)
    append(cache, stream, 3)
    mark = stream.mark()
    with pytest.raises(ValueError, match="rewind it first"):
        cache.snapshot(stream)
    stream.rewind(mark)
    assert cache.snapshot(stream)["state"].tolist() == [3, 0]


@pytest.mark.parametrize("slots_between", [0, 1])
def test_restore_gives_back_every_visible_row(slots_between: int) -> None:
    cache = make_cache()
    stream = cache.open(3)
    for _ in range(41):
        append(cache, stream, 1)
    cache.evict(stream, 33, 35)
    tensors = cache.snapshot(stream)
    other = make_cache()
    for _ in range(slots_between):
        other.open(0)
    copy = other.restore(tensors)
    assert (copy.slot, copy.length, copy.sinks, copy.holes) == (slots_between, 41, 3, ((33, 35),))
    assert copy.last_hidden is not None
    assert torch.equal(copy.last_hidden, torch.tensor([40.0, 40.0]))
    for old, new in zip(cache.layers, other.layers, strict=True):
        rows = old.logical_rows(3, 41)
        assert torch.equal(new.keys[copy.slot][:, rows], old.keys[stream.slot][:, rows])
        assert torch.equal(new.values[copy.slot][:, rows], old.values[stream.slot][:, rows])


def test_an_untouched_stream_can_be_saved_and_restored() -> None:
    cache = make_cache()
    copy = cache.restore(cache.snapshot(cache.open(2)))
    assert (copy.length, copy.sinks, copy.last_hidden) == (0, 2, None)


@pytest.mark.parametrize(
    "other",
    [
        {"geometries": [LayerGeometry(True, 13), SLIDING]},
        {"geometries": [LayerGeometry(True, 11), SLIDING]},
        {"geometries": [ROLLING, LayerGeometry(False, 4)]},
        {"geometries": [ROLLING]},
        {"geometries": [ROLLING, SLIDING, SLIDING]},
        {"kv_heads": 2},
        {"head_dim": 4},
    ],
    ids=["wider", "narrower", "sliding", "fewer layers", "more layers", "kv heads", "head dimension"],
)
def test_a_snapshot_of_another_shape_is_refused_and_takes_no_slot(other: dict[str, object]) -> None:
    cache = make_cache()
    stream = cache.open(4)
    for _ in range(50):
        append(cache, stream, 1)
    target = make_cache(**other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another window, model or dtype"):
        target.restore(cache.snapshot(stream))
    assert target.free_slots == 3


def test_a_snapshot_with_longer_sinks_than_planned_is_refused() -> None:
    cache = make_cache(max_sinks=9)
    stream = cache.open(9)
    append(cache, stream, 5)
    target = make_cache()
    with pytest.raises(WindowError, match="9 tokens"):
        target.restore(cache.snapshot(stream))
    assert target.free_slots == 3
