"""A stream far beyond the trained length reads as well as at its beginning: the default model, a real speech."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from torch import Tensor

from streamllm_core import AutoModel, EngineConfig, ModelError, Request, StreamingModel
from streamllm_core.layout import MicroBatch
from streamllm_core.rotary import Rotary
from streamllm_core.weights import DEFAULT_MODEL, open_source

SPEECHES = Path(__file__).parents[2] / "samples" / "speeches.parquet"
SINKS, WINDOW = 4, 512
WARM_UP, SCORED = 64, 640  # the warm-up fills the window a little: a stream that has just jumped sees its sinks alone
FAR = (1_000_000, 10_000_000)


@pytest.fixture(scope="module")
def model() -> StreamingModel:
    try:
        open_source(DEFAULT_MODEL, dtype=torch.float32)
    except ModelError as error:
        pytest.skip(str(error))
    return AutoModel.from_pretrained(DEFAULT_MODEL, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def speech(model: StreamingModel) -> list[int]:
    table = pyarrow.parquet.read_table(SPEECHES, filters=[("id", "=", "2015-obama-1")])
    text = table["text"][0].as_py()[:6000]
    return list(model.tokenizer(text, add_special_tokens=False)["input_ids"][: SINKS + WARM_UP + SCORED])


def perplexities(model: StreamingModel, tokens: Sequence[int], jumps: Sequence[int]) -> list[float]:
    """Of the last ``SCORED`` tokens, read after the stream was moved ahead behind its sinks by each of ``jumps``."""
    engine = model.engine(EngineConfig(window=WINDOW, sinks=SINKS, streams=len(jumps), excursion=0))
    requests = []
    for jump in jumps:
        stream = engine.open(tokens[:SINKS])
        if jump:  # tokens that were never read are hidden like evicted ones
            stream.holes = ((stream.length, stream.length + jump),)
            stream.length += jump
        requests.append(Request(stream, tokens[SINKS:], score=True))
        engine.submit(requests[-1])
    while engine.busy:
        engine.step()
    return [math.exp(-sum(request.logprobs[WARM_UP:]) / SCORED) for request in requests]


def test_perplexity_does_not_depend_on_the_position(model: StreamingModel, speech: list[int]) -> None:
    near, *far = perplexities(model, speech, [0, *FAR])
    assert near < 40
    for perplexity in far:
        assert perplexity == pytest.approx(near, rel=0.01)


def test_sinks_at_their_true_distance_would_fail(
    model: StreamingModel, speech: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measure above can fail: it does by far when nothing keeps the sinks in reach."""
    rotate = Rotary.rotate

    def ignoring_recent(
        self: Rotary, attention: Any, batch: MicroBatch, query: Tensor, key: Tensor, recent: int | None = None
    ) -> tuple[Tensor, Tensor]:
        return rotate(self, attention, batch, query, key)

    monkeypatch.setattr(Rotary, "rotate", ignoring_recent)
    [wrong] = perplexities(model, speech, FAR[:1])
    assert wrong > 200
