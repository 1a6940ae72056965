"""Speed on a CPU beside transformers: same model, dtype, threads and documents, in one run.

    python tests/benchmarks/cpu_speed.py [--dtype float32] [--only reading,single,many] [--random]

The model is the default one or, with --random, random weights of its shape on random tokens: speed is the same.

reading  6,000 tokens at a window of 1,020, against transformers decoding token by token at that cache length
single   one document that fits its window, 128 tokens out, against ``generate``
many     16 documents of 500 to 4,000 tokens, 128 tokens out each, against ``generate`` one by one and in left-padded
         batches of four of similar length, whichever is faster
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from streamllm_core import AutoModel, EngineConfig, Request, StreamingModel
from streamllm_core.weights import open_source

SPEECHES = Path(__file__).parents[2] / "samples" / "speeches.parquet"
ANSWER = 128


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def reading(ours: StreamingModel, stock: Any, text: list[int]) -> tuple[float, float]:
    """Tokens a second: reading here, decoding there."""
    window, sinks, steps = 1015, 4, 24
    engine = ours.engine(EngineConfig(window=window, sinks=sinks, streams=1, excursion=0))
    stream = engine.open(text[:sinks])
    engine.submit(Request(stream, text[sinks:6000]))

    def read() -> None:
        while engine.busy:
            engine.step()

    cache = DynamicCache()
    keep = window + sinks
    with torch.inference_mode():
        stock(torch.tensor([text[:keep]]), past_key_values=cache)

        def decode() -> None:
            for token in text[keep : keep + steps]:
                stock(torch.tensor([[token]]), past_key_values=cache)

        decode()
        slow = steps / timed(decode)
    return (6000 - sinks) / timed(read), slow


def stock_answers(stock: Any, batches: list[list[list[int]]]) -> None:
    for batch in batches:
        longest = max(len(row) for row in batch)
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch])
        stock.generate(
            ids, attention_mask=mask, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False, pad_token_id=0
        )


def our_answers(ours: StreamingModel, documents: list[list[int]]) -> None:
    longest = max(len(document) for document in documents) + ANSWER
    engine = ours.engine(EngineConfig(window=longest, sinks=4, streams=len(documents), excursion=0))
    for document in documents:
        engine.submit(Request(engine.open(sinks=4), document, max_new_tokens=ANSWER))
    while engine.busy:
        engine.step()


def random_model(folder: Path) -> Path:
    """SmolLM2-135M's shape."""
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49_152,
        max_position_embeddings=8192,
        rope_theta=1e5,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def speeches(model: StreamingModel) -> list[int]:
    """The sample speeches as one long list of tokens."""
    import pyarrow.parquet

    texts = pyarrow.parquet.read_table(SPEECHES, columns=["text"])["text"].to_pylist()
    return [token for text in texts for token in model.tokenizer(text, add_special_tokens=False)["input_ids"]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="reading,single,many")
    parser.add_argument("--random", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = random_model(Path(temporary)) if options.random else open_source("smollm2", dtype=dtype).config_dir
        ours = AutoModel.from_pretrained(folder, device="cpu", dtype=dtype)
        stock = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    pool = [rng.randrange(3, 49_000) for _ in range(60_000)] if options.random else speeches(ours)
    print(f"{options.dtype}, {options.threads} threads, computed here in {ours.dtype}")

    if "reading" in options.only:
        fast, slow = reading(ours, stock, pool)
        print(f"reading  {fast:8.1f} tok/s   transformers decoding {slow:6.1f} tok/s   ratio {fast / slow:5.1f}")
    if "single" in options.only:
        document = pool[20_000:20_900]
        mine = [timed(lambda: our_answers(ours, [document])) for _ in range(2)]
        theirs = [timed(lambda: stock_answers(stock, [[document]])) for _ in range(2)]
        ratio = min(theirs) / min(mine)
        print(f"single   {min(mine):8.1f} s       transformers {min(theirs):8.1f} s   ratio {ratio:5.2f}")
    if "many" in options.only:
        documents = []
        for _ in range(16):
            start = rng.randrange(len(pool) - 4000)
            documents.append(pool[start : start + rng.randrange(500, 4000)])
        documents.sort(key=len)
        mine = timed(lambda: our_answers(ours, documents))
        print(f"many     {mine:8.1f} s  ({sum(map(len, documents))} tokens)", flush=True)
        single = timed(lambda: stock_answers(stock, [[document] for document in documents]))
        print(f"         transformers one by one {single:8.1f} s   ratio {single / mine:5.2f}", flush=True)
        batched = timed(lambda: stock_answers(stock, [documents[i : i + 4] for i in range(0, 16, 4)]))
        print(f"         transformers in batches {batched:8.1f} s   ratio {batched / mine:5.2f}")


if __name__ == "__main__":
    main()
