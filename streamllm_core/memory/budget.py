"""KVCacheSizingManager: turns a byte budget into a MemoryPlan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from streamllm_core.errors import BudgetError
from streamllm_core.memory.limits import UNLIMITED, format_bytes
from streamllm_core.memory.plan import Batching, MemoryPlan, Placement, Prediction
from streamllm_core.memory.sizes import ModelSizes

if TYPE_CHECKING:
    from streamllm_core.hardware import LinkRates

# Share of the measured rate of square products that whole layers reach, attention and elementwise work included.
EFFICIENCY = 0.7
# What the host needs, beside the device: to set a layer to work on a micro-batch, to have a packed layer expanded, and
# between two passes (tokens chosen, embeddings gathered), which nothing hides but transfers.
LAUNCH_SECONDS = 7.2e-4
EXPAND_SECONDS = 4e-4
GAP_SECONDS = 8e-3
# Fewer tokens of a stream, or in a layer, leave the units idle: only where memory is too small for more.
FEW_TOKENS = 512
FEWEST_TOKENS = 64


@dataclass(frozen=True)
class Demand:
    """What a plan is to serve.

    window, sinks, excursion: as in EngineConfig, tokens. cache_bytes: bytes of one stream's cache for a given headroom
    in tokens. streams: the most that are wanted. pass_tokens, micro_tokens: the most, or None to choose.
    read_tokens, answer_tokens: what a typical document (or segment with its question) reads and generates.
    """

    window: int
    excursion: int
    cache_bytes: Callable[[int], int]
    streams: int
    most_pass_tokens: int
    most_micro_tokens: int
    pass_tokens: int | None = None
    micro_tokens: int | None = None
    read_tokens: int = 1000
    answer_tokens: int = 100


class KVCacheSizingManager:
    """Answers from sizes and rates alone: the same question gets the same plan."""

    def __init__(self, budget: int, rates: LinkRates, slack: int = 0) -> None:
        """``budget``: bytes on the device; ``slack`` of them are left to the allocator."""
        self.budget = budget
        self.rates = rates
        self.slack = slack

    def plan(self, sizes: ModelSizes, demand: Demand, resident: int | None = None) -> MemoryPlan:
        """The plan with the highest predicted speed for ``demand``; among equals the one with the most streams, then
        with the most resident layers, then with the largest passes. ``resident`` fixes how many layers stay.

        Raises BudgetError, with the arithmetic and the smallest budget that would do, when nothing fits.
        """
        return self._best(list(_placements(sizes, resident)), demand)

    def batch(self, placement: Placement, demand: Demand) -> MemoryPlan:
        """The best plan for a model that is loaded already. Raises BudgetError."""
        return self._best([placement], demand)

    def _best(self, placements: list[Placement], demand: Demand) -> MemoryPlan:
        for least in (FEW_TOKENS, FEWEST_TOKENS):
            plans = [plan for place in placements for plan in self._plans(place, demand, least)]
            if plans:
                return max(plans, key=_preference)
        raise self._refusal(placements, demand)

    def _plans(self, placement: Placement, demand: Demand, least: int) -> Iterator[MemoryPlan]:
        left = self.budget - self.slack - placement.total
        for batching in _batchings(placement.sizes, demand, left, least):
            prediction = self._predict(placement, batching, demand)
            yield MemoryPlan(self.budget, self.slack, placement, batching, prediction)

    def _predict(self, placement: Placement, batching: Batching, demand: Demand) -> Prediction:
        full, streams, answer = batching.pass_tokens, batching.streams, demand.answer_tokens
        document = demand.read_tokens + answer
        # Streams pass from reading to generating one after the other, so passes of a long job carry both: each
        # finished document has held its stream for one pass a token, and while it read.
        finished = min(full / document, max(streams - 1, streams / (1 + answer)) / max(answer, 1))
        mixed = max(1.0, finished * document)
        prefill_transfer = placement.layer_bytes_per_pass / self.rates.host_to_device
        # The head comes when the layers are through, and the next pass begins only behind it.
        head_transfer = placement.bytes_per_pass / self.rates.host_to_device - prefill_transfer
        prefill_compute = self._compute_seconds(placement, batching, demand, full, 0)
        decode_compute = self._compute_seconds(placement, batching, demand, streams, streams)
        generating = min(float(streams), mixed * answer / document)
        mixed_compute = self._compute_seconds(placement, batching, demand, ceil(mixed), generating)
        return Prediction(
            prefill_transfer,
            prefill_compute,
            prefill_transfer + head_transfer,
            decode_compute,
            prefill=full / max(prefill_transfer, prefill_compute),
            decode=streams / (head_transfer + max(prefill_transfer, decode_compute)),
            job=mixed / (head_transfer + max(prefill_transfer, mixed_compute)),
        )

    def _compute_seconds(
        self, placement: Placement, batching: Batching, demand: Demand, tokens: int, generating: float
    ) -> float:
        """For a pass of so many tokens, of which ``generating`` streams have one each: operations, memory traffic or
        the host, whichever takes longest."""
        sizes = placement.sizes
        operations = sizes.pass_operations(tokens, demand.window) / (self.rates.matmul * EFFICIENCY)
        traffic = sizes.weight_traffic(tokens, batching.micro_tokens) + generating * batching.stream_bytes
        if generating:
            traffic += sizes.head
        launches = ceil(tokens / batching.micro_tokens) * LAUNCH_SECONDS + (EXPAND_SECONDS if sizes.workspace else 0)
        return max(operations, traffic / self.rates.memory, len(sizes.layers) * launches) + GAP_SECONDS

    def _refusal(self, placements: list[Placement], demand: Demand) -> BudgetError:
        """Everything at its smallest, added up."""
        smallest = min(placements, key=lambda placement: placement.total)
        sizes = smallest.sizes
        batching = min(_batchings(sizes, demand, UNLIMITED, FEWEST_TOKENS), key=_first_stream)
        needed = self.slack + smallest.total + _first_stream(batching)
        parts = {
            "fixed weights": sizes.fixed,
            "head": smallest.head_bytes,
            "two scratchpads": smallest.scratchpads,
            "workspace": smallest.workspace,
            f"{len(smallest.resident)} resident layers": smallest.resident_bytes,
            "one stream": batching.stream_bytes,
            "activations": batching.activations,
            "allocator slack": self.slack,
        }
        sum_ = " + ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        return BudgetError(
            f"a budget of {format_bytes(self.budget)} does not suffice: {sum_} = {format_bytes(needed)} is "
            "the least. Give at least that, or use a smaller window or quantized weights."
        )


def _placements(sizes: ModelSizes, resident: int | None) -> Iterator[Placement]:
    """Every number of resident layers, spread evenly so that transfers hide behind more work; the head stays or is
    streamed in tiles. A head that shares its bytes, or that cannot be cut, stays."""
    count = len(sizes.layers)
    numbers = range(count + 1) if resident is None else [min(resident, count)]
    for number in numbers:
        chosen = tuple(sorted({index * count // number for index in range(number)})) if number else ()
        yield Placement(sizes, chosen, head_stays=True)
        if 0 < 2 * sizes.head_tile < sizes.head:
            yield Placement(sizes, chosen, head_stays=False)


def _batchings(sizes: ModelSizes, demand: Demand, left: int, least: int) -> Iterator[Batching]:
    """For each number of tokens a pass and in a layer, at least ``least``, as many streams as fit into ``left``."""
    for pass_tokens in [demand.pass_tokens] if demand.pass_tokens else _powers(least, demand.most_pass_tokens):
        most = min(demand.micro_tokens or demand.most_micro_tokens, pass_tokens)
        for micro_tokens in [most] if demand.micro_tokens else _powers(least, most):
            # Enough streams fill a micro-batch with short pieces, and a ring must hold the piece of only one.
            chunk = max(min(micro_tokens, FEW_TOKENS), micro_tokens // demand.streams)
            stream_bytes = demand.cache_bytes(max(chunk, demand.excursion))
            activations = sizes.activation_bytes(micro_tokens, pass_tokens)
            streams = min(demand.streams, (left - activations) // stream_bytes)
            if streams >= 1:
                yield Batching(streams, stream_bytes, pass_tokens, micro_tokens, chunk, activations)


def _powers(least: int, most: int) -> list[int]:
    """``least`` doubled again and again, and ``most``."""
    numbers = [most]
    while least < most:
        numbers.append(least)
        least *= 2
    return sorted(numbers)


def _first_stream(batching: Batching) -> int:
    return batching.activations + batching.stream_bytes


def _preference(plan: MemoryPlan) -> tuple[float, int, int, int]:
    """Speeds that differ by a hundredth are the same."""
    speed = float(f"{plan.prediction.job:.3g}")
    return speed, plan.batching.streams, len(plan.resident), plan.batching.pass_tokens
