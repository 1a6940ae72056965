"""The default model against stock transformers on the same converted folder."""

from __future__ import annotations

import pytest
import torch

from streamllm_core import AutoModel, ModelError
from streamllm_core.weights import DEFAULT_MODEL, open_source
from tests.streamllm_core.tiny_models import load_stock

PASSAGE = """The harbour master kept two books. In the first he wrote down the ships: their names, the day on which they
came in, the weight of what they carried and the number of hands on board. In the second, which nobody but his daughter
ever saw, he wrote down the weather, and beside it what the gulls did an hour before. After nineteen years he could say
on most mornings whether it would blow by noon, and the fishermen, who laughed at the second book without having seen
it, had long since made it their habit to stroll past his window before they put to sea. When the shutters stood open
they went out. When they were closed, they mended nets, and cursed the gulls. In the spring of 1871 the company in the
capital sent down a young engineer with a barometer of brass and glass, 3 instructions in a sealed envelope, and a
salary that was twice the harbour master's own. He hung the barometer in the office, opposite the window, and asked
politely where the records were kept. The old man gave him the first book. For 40 days the engineer wrote down what the
glass said, and for 40 days the boats went out and came back by what the shutters said, and nobody mentioned either."""


@torch.inference_mode()
def test_default_model_equals_stock() -> None:
    try:
        folder = open_source(DEFAULT_MODEL, dtype=torch.float32).config_dir
    except ModelError as error:
        pytest.skip(str(error))
    stock = load_stock(folder)
    model = AutoModel.from_pretrained(DEFAULT_MODEL, device="cpu", dtype="float32")
    ids = torch.tensor([model.tokenizer(PASSAGE)["input_ids"]])
    assert 250 < ids.shape[1] < 350
    expected = stock(ids).logits
    torch.testing.assert_close(model.logits(ids, chunk_tokens=100), expected, atol=2e-4, rtol=0)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16}
    assert torch.equal(model.generate(ids, **options), stock.generate(ids, do_sample=False, **options))
