"""``generate`` and ``stream_generate`` with the arguments that users of transformers expect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from streamllm_core.engine import Engine
from streamllm_core.engine_config import EngineConfig
from streamllm_core.request import Request
from streamllm_core.sampling import Sampling

if TYPE_CHECKING:
    from streamllm_core.model import StreamingModel

DEFAULT_SINKS = 4


@dataclass(frozen=True)
class Generation:
    """``sequences`` int64 [batch, T + new]: input and answer of each row; rows that ended early are padded."""

    sequences: Tensor


def generate(
    model: StreamingModel,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 20,
    use_cache: bool = True,
    return_dict_in_generate: bool = False,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    window: int | None = None,
    draft_tokens: int | None = None,
) -> Tensor | Generation:
    """Continue each row of ``input_ids`` int64 [batch, T] until an end-of-sequence token or ``max_new_tokens``.

    Each row gives what it would give alone: tokens whose ``attention_mask`` [batch, T] is 0 are left out, not masked.
    Texts longer than the model's context roll (4 sinks and a window as long as the context allows, or ``window``).
    ``draft_tokens``: see ``EngineConfig``; they change the speed, not the answer.
    Returns int64 [batch, T + new] on the device of ``input_ids`` or, with ``return_dict_in_generate``, an object
    with that as ``sequences``. Raises ValueError for arguments that make no sense.
    """
    if not use_cache:
        raise ValueError("use_cache=False is not supported: the rolling cache is how this runtime works")
    sampling = Sampling(temperature if do_sample else 0.0, top_p, seed)
    rows = _rows(input_ids, attention_mask)
    engine = _engine(model, rows, max_new_tokens, window, draft_tokens)
    requests: list[Request] = []
    while engine.busy or len(requests) < len(rows):
        while engine.free_streams and len(requests) < len(rows):  # perhaps not all rows fit at a time
            row_sampling = replace(sampling, key=(len(requests),))
            requests.append(_request(model, engine, rows[len(requests)], max_new_tokens, row_sampling))
        for request in engine.step():
            engine.close(request.stream)
    answers = [request.generated + ([] if request.stopped_by is None else [request.stopped_by]) for request in requests]
    longest = max(len(answer) for answer in answers)
    padded = [answer + [_pad(model)] * (longest - len(answer)) for answer in answers]
    new = torch.tensor(padded, dtype=input_ids.dtype, device=input_ids.device).view(len(answers), longest)
    sequences = torch.cat([input_ids, new], 1)
    return Generation(sequences) if return_dict_in_generate else sequences


def stream_generate(
    model: StreamingModel,
    input_ids: Tensor,
    *,
    max_new_tokens: int = 20,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    window: int | None = None,
    draft_tokens: int | None = None,
) -> Iterator[str]:
    """The answer to one row [1, T] as pieces of text, as soon as they are certain: whole characters only."""
    rows = _rows(input_ids, None)
    if len(rows) != 1:
        raise ValueError(f"stream_generate takes one row, not {len(rows)}")
    engine = _engine(model, rows, max_new_tokens, window, draft_tokens)
    sampling = Sampling(temperature if do_sample else 0.0, top_p, seed, key=(0,))  # what generate draws for this row
    request = _request(model, engine, rows[0], max_new_tokens, sampling)
    shown = start = 0  # tokens whose text is out; first token that is decoded again for context
    while engine.busy:
        engine.step()
        context = model.tokenizer.decode(request.generated[start:shown], skip_special_tokens=True)
        text = model.tokenizer.decode(request.generated[start:], skip_special_tokens=True)
        whole = not text.endswith("�") or not engine.busy  # a character may still be missing bytes
        if whole and len(text) > len(context):
            start, shown = shown, len(request.generated)
            yield text[len(context) :]


def _rows(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids must be [batch, tokens] with at least one token, not {list(input_ids.shape)}")
    if attention_mask is None:
        return input_ids.tolist()
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask {list(attention_mask.shape)} does not match {list(input_ids.shape)}")
    rows = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask.to(input_ids.device), strict=True)]
    if not all(rows):
        raise ValueError("attention_mask leaves a row without tokens")
    return rows


def _engine(
    model: StreamingModel, rows: list[list[int]], max_new_tokens: int, window: int | None, draft_tokens: int | None
) -> Engine:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    needed = max(len(row) for row in rows) + max_new_tokens
    sinks, recent = DEFAULT_SINKS, model.trained_context - DEFAULT_SINKS - 1 if window is None else window
    if window is None and needed <= model.trained_context:  # nothing is evicted, so nothing needs a pin
        sinks, recent = 0, needed - 1
    config = EngineConfig(window=recent, sinks=sinks, excursion=0, streams=len(rows), draft_tokens=draft_tokens)
    return model.engine(config)


def _request(model: StreamingModel, engine: Engine, row: list[int], max_new_tokens: int, sampling: Sampling) -> Request:
    stream = engine.open(sinks=engine.config.sinks)
    request = Request(stream, row, max_new_tokens=max_new_tokens, sampling=sampling, stop=model.stop_tokens)
    engine.submit(request)
    return request


def _pad(model: StreamingModel) -> int:
    pad = model.config.pad_token_id
    return pad if pad is not None else min(model.stop_tokens, default=0)
