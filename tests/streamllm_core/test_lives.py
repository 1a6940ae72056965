"""Random lives of many streams in one engine, each token of them checked against the dense float64 model.

Read together, ask, write, fork, evict, save and restore, close, with NaN in every free slot: in any order. Answers are
drafted ahead, more wrong than right.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from streamllm_core import Engine, ModelDrafter, Request, Stream, StreamingModel
from streamllm_core.cache import MAX_HOLES
from tests.streamllm_core.dense_reference import DenseLlama, Eviction
from tests.streamllm_core.tiny_engines import HEADROOM, WINDOW, fill, run, small_engine

STREAMS = 5
TOLERANCE = {"cpu": 5e-4, "cuda": 2e-3}  # of log-probabilities


@dataclass
class Life:
    """A stream and what it ought to remember."""

    stream: Stream
    tokens: list[int]
    evictions: list[Eviction] = field(default_factory=list)


class World:
    """An engine and the streams that live in it."""

    def __init__(self, engine: Engine, dense: DenseLlama, seed: int) -> None:
        self.engine = engine
        self.lives: list[Life] = []
        self.checked = 0
        self._dense = dense
        self._chance = random.Random(seed)
        self._pins = [self._text(3), self._text(4)]

    def live(self) -> None:
        """One random event."""
        acts = [self._read, self._read, self._read, self._ask, self._write, self._fork, self._evict, self._move]
        acts.append(self._close)
        act = self._chance.choice(acts)
        if not self.lives or (self.engine.free_streams and self._chance.random() < 0.2):
            act = self._open
        act()
        used = {life.stream.slot for life in self.lives}
        fill(self.engine, [slot for slot in range(STREAMS) if slot not in used], float("nan"))

    def _open(self) -> None:
        if self._chance.random() < 0.5:
            pin = self._chance.choice(self._pins)
            self.lives.append(Life(self.engine.open(pin), list(pin)))
        else:
            self.lives.append(Life(self.engine.open(sinks=self._chance.randint(0, 4)), []))

    def _read(self) -> None:
        """Some streams read in shared passes, chunks of all sizes."""
        lives = self._chance.sample(self.lives, self._chance.randint(1, len(self.lives)))
        requests = [Request(life.stream, self._text(self._chance.choice([1, 5, 30])), score=True) for life in lives]
        run(self.engine, *requests)
        for life, request in zip(lives, requests, strict=True):
            life.tokens += request.tokens
            self._check(life, request)

    def _ask(self) -> None:
        """A question on an excursion, beside another stream that reads."""
        life = self._chance.choice(self.lives)
        answer = self._chance.choice([0, 1, 7])
        question = self._text(self._chance.randint(1, HEADROOM + 1 - max(answer, 1)))
        request = Request(life.stream, question, max_new_tokens=answer, excursion=True, score=True)
        others = [other for other in self.lives if other is not life][:1]
        beside = [Request(other.stream, self._text(11), score=True) for other in others]
        run(self.engine, request, *beside)
        self._check(Life(life.stream, life.tokens + question, life.evictions), request)
        for other, reading in zip(others, beside, strict=True):
            other.tokens += reading.tokens
            self._check(other, reading)

    def _write(self) -> None:
        """Answers that stay, of several streams together."""
        lives = self._chance.sample(self.lives, self._chance.randint(1, len(self.lives)))
        requests = [Request(life.stream, self._text(2), max_new_tokens=self._chance.randint(1, 9)) for life in lives]
        run(self.engine, *requests)
        for life, request in zip(lives, requests, strict=True):
            life.tokens += [*request.tokens, *request.generated[:-1]]  # the last token is never read
            assert life.stream.length == len(life.tokens)

    def _fork(self) -> None:
        if self.engine.free_streams:
            life = self._chance.choice(self.lives)
            self.lives.append(Life(self.engine.fork(life.stream), life.tokens[:], life.evictions[:]))

    def _evict(self) -> None:
        life = self._chance.choice(self.lives)
        length, sinks = len(life.tokens), life.stream.sinks
        if length <= sinks or len(life.stream.holes) == MAX_HOLES:
            return
        start = self._chance.randint(max(sinks, length - WINDOW - 5), length - 1)
        stop = min(length, start + self._chance.randint(1, 9))
        self.engine.evict(life.stream, start, stop)
        life.evictions.append((length, start, stop))

    def _move(self) -> None:
        """Save, close, restore: often into another slot."""
        life = self._chance.choice(self.lives)
        tensors = self.engine.snapshot(life.stream)
        self.engine.close(life.stream)
        if self._chance.random() < 0.5:
            self._open()
        fill(self.engine, self.engine.cache._free, float("nan"))
        if self.engine.free_streams:
            life.stream = self.engine.restore(tensors)
        else:
            self.lives.remove(life)

    def _close(self) -> None:
        life = self.lives.pop(self._chance.randrange(len(self.lives)))
        self.engine.close(life.stream)

    def _check(self, life: Life, request: Request) -> None:
        """The log-probabilities of what was just read."""
        logits = self._dense.logits(life.tokens, sinks=life.stream.sinks, window=WINDOW, evictions=life.evictions)
        count = len(request.logprobs)
        assert count == len(request.tokens) - (len(life.tokens) == len(request.tokens))
        wanted = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(life.tokens)[1:, None])[:, 0]
        found = torch.tensor(request.logprobs, dtype=torch.float64)
        tolerance = TOLERANCE[self.engine.model.device.type]
        assert torch.allclose(found, wanted[len(wanted) - count :], rtol=0, atol=tolerance)
        self.checked += count

    def _text(self, count: int) -> list[int]:
        return [self._chance.randrange(97) for _ in range(count)]


class Careless(ModelDrafter):
    """Proposes what the model itself would say, but forgets what it is doing."""

    def __init__(self, model: StreamingModel, seed: int) -> None:
        super().__init__(model, STREAMS)
        self._chance = random.Random(seed)

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        proposals = super().propose(requests, most)
        for proposal in proposals:
            if proposal and self._chance.random() < 0.7:
                proposal[self._chance.randrange(len(proposal))] = self._chance.randrange(97)
        return proposals


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_every_token_is_read_as_by_the_dense_model(
    llama: StreamingModel, dense: DenseLlama, seed: int
) -> None:
    engine = small_engine(
        llama, streams=STREAMS, pass_tokens=20 + seed, micro_tokens=3 + 2 * seed, draft_tokens=2 + seed
    )
    Careless(llama, seed).attach(engine)
    world = World(engine, dense, seed)
    for _ in range(40):
        world.live()
    assert world.checked > 200
    assert 0 < engine.tokens_accepted < engine.tokens_drafted
