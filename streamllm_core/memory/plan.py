"""MemoryPlan: where every byte of a budget goes, and what speed that should give."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from streamllm_core.memory.sizes import ModelSizes


@dataclass(frozen=True)
class Placement:
    """What lies on the device for as long as the model is loaded.

    resident: indices of the decoder layers that stay; the others are streamed. head_stays: the same for the head.
    """

    sizes: ModelSizes
    resident: tuple[int, ...]
    head_stays: bool

    @property
    def streamed(self) -> tuple[int, ...]:
        return tuple(index for index in range(len(self.sizes.layers)) if index not in self.resident)

    @property
    def scratchpads(self) -> int:
        """Both slots."""
        return 2 * max((self.sizes.layers[index] for index in self.streamed), default=0)

    @property
    def resident_bytes(self) -> int:
        return sum(self.sizes.kept[index] for index in self.resident)

    @property
    def workspace(self) -> int:
        """Packed layers are expanded there, unless all of them stay and are kept expanded."""
        expands = self.streamed or self.sizes.kept == self.sizes.layers
        return self.sizes.workspace if expands else 0

    @property
    def head_bytes(self) -> int:
        return self.sizes.head if self.head_stays else 2 * self.sizes.head_tile

    @property
    def bytes_per_pass(self) -> int:
        """What crosses the link in a pass that generates tokens."""
        return self.layer_bytes_per_pass + (0 if self.head_stays else self.sizes.head)

    @property
    def layer_bytes_per_pass(self) -> int:
        return sum(self.sizes.layers[index] for index in self.streamed)

    @property
    def total(self) -> int:
        return self.sizes.fixed + self.head_bytes + self.scratchpads + self.workspace + self.resident_bytes


@dataclass(frozen=True)
class Batching:
    """How many streams are in flight, and how many tokens go together, in tokens.

    pass_tokens: in one pass over the weights. micro_tokens: through a layer. chunk_tokens: of one stream through a
    layer; the rings' headroom holds at least that many. stream_bytes: the cache of one stream.
    """

    streams: int
    stream_bytes: int
    pass_tokens: int
    micro_tokens: int
    chunk_tokens: int
    activations: int

    @property
    def total(self) -> int:
        return self.streams * self.stream_bytes + self.activations


@dataclass(frozen=True)
class Prediction:
    """Seconds a pass, and tokens a second, from the rates of the links and units.

    ``prefill`` and ``decode`` are passes of nothing else: full of text that is read, and of one token for each stream.
    ``job`` mixes them as the expected work does.
    """

    prefill_transfer: float
    prefill_compute: float
    decode_transfer: float
    decode_compute: float
    prefill: float
    decode: float
    job: float

    @property
    def prefill_limit(self) -> str:
        return "transfer" if self.prefill_transfer > self.prefill_compute else "compute"

    @property
    def decode_limit(self) -> str:
        return "transfer" if self.decode_transfer > self.decode_compute else "compute"


@dataclass(frozen=True)
class MemoryPlan:
    """A placement and a batching that together stay inside ``budget`` bytes, with ``slack`` for the allocator."""

    budget: int
    slack: int
    placement: Placement
    batching: Batching
    prediction: Prediction

    @property
    def resident(self) -> tuple[int, ...]:
        return self.placement.resident

    @property
    def total(self) -> int:
        return self.slack + self.placement.total + self.batching.total

    def items(self) -> dict[str, int]:
        """Every byte by purpose."""
        place, batch = self.placement, self.batching
        streamed = len(place.streamed)
        return {
            "norms and other fixed weights": place.sizes.fixed,
            "head" if place.head_stays else "head, two tiles (streamed)": place.head_bytes,
            f"two scratchpads ({streamed} of {len(place.sizes.layers)} layers are streamed)": place.scratchpads,
            "workspace (one layer, expanded)": place.workspace,
            f"{len(place.resident)} resident layers": place.resident_bytes,
            f"cache of {batch.streams} streams x {batch.stream_bytes / 1e6:.1f} MB": batch.streams * batch.stream_bytes,
            f"activations ({batch.micro_tokens} tokens in a layer, {batch.pass_tokens} in a pass)": batch.activations,
            "allocator slack": self.slack,
        }

    def as_dict(self) -> dict[str, object]:
        """For programs: sizes in bytes, speeds in tokens a second."""
        place, batch = self.placement, self.batching
        return {
            "budget_bytes": self.budget,
            "plan_bytes": self.total,
            "bytes": self.items(),
            "resident_layers": list(place.resident),
            "streamed_layers": list(place.streamed),
            "head_stays": place.head_stays,
            "link_bytes_per_pass": place.bytes_per_pass,
            **{name: value for name, value in asdict(batch).items() if name != "activations"},
            "prediction": asdict(self.prediction)
            | {"prefill_limit": self.prediction.prefill_limit, "decode_limit": self.prediction.decode_limit},
        }

    def table(self) -> str:
        """For people: bytes, then speed and what limits it."""
        lines = [f"{name:<64}{size / 1e6:>12,.1f} MB" for name, size in self.items().items() if size]
        lines.append(f"{'plan':<64}{self.total / 1e6:>12,.1f} MB")
        lines.append(f"{'budget':<64}{self.budget / 1e6:>12,.1f} MB")
        speed = self.prediction
        lines += [
            "",
            f"reading     {speed.prefill:>12,.0f} tokens/s   a pass: transfer {1e3 * speed.prefill_transfer:.1f} ms, "
            f"compute {1e3 * speed.prefill_compute:.1f} ms; {speed.prefill_limit} is the limit",
            f"generating  {speed.decode:>12,.0f} tokens/s   a pass: transfer {1e3 * speed.decode_transfer:.1f} ms, "
            f"compute {1e3 * speed.decode_compute:.1f} ms; {speed.decode_limit} is the limit",
            f"both mixed  {speed.job:>12,.0f} tokens/s",
        ]
        return "\n".join(lines)
