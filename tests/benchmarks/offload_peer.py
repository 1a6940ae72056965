"""accelerate's CPU offload with transformers' generate, for the job of `streamllm bench --documents`.

    python -m tests.benchmarks.offload_peer [--shape qwen2.5-7b] [--documents 64] [--tokens 16384] [--cap 4GB]

The same shape in bf16, random weights, everything in RAM, at most ``cap`` of memory on the card. The largest batch that
runs under the cap is timed: its whole prefill and a few decode steps; the time of the job is
batches x (prefill + answer x step). Twice: with accelerate as shipped, and with its weights page-locked by hand.
"""

from __future__ import annotations

import argparse
import os
import time
from math import ceil
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # it would not fit otherwise

import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.initialization import no_init_weights

from streamllm_core.bench.shapes import SHAPES
from streamllm_core.memory.limits import parse_bytes

STEPS = 16
CHUNK = 2048  # of the prefill: whole, its activations would not fit


def build(shape: str) -> Any:
    """The model in RAM, weights made on the card."""
    config = SHAPES[shape].config()
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                value = torch.empty(parameter.shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02).cpu()
                module._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
    base = model.model
    base.rotary_emb = type(base.rotary_emb)(config=config)
    torch.cuda.empty_cache()
    return model


@torch.inference_mode()
def measure(model: Any, batch: int, tokens: int) -> tuple[float, float]:
    """Seconds of the prefill and of a decode step."""
    ids = torch.randint(1000, (batch, tokens), device="cuda")
    cache = DynamicCache(config=model.config)
    start = time.perf_counter()
    for begin in range(0, tokens, CHUNK):
        output = model(input_ids=ids[:, begin : begin + CHUNK], past_key_values=cache, logits_to_keep=1)
    token = output.logits[:, -1:].argmax(-1)
    torch.cuda.synchronize()
    prefill = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(STEPS):
        token = model(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(-1)
    torch.cuda.synchronize()
    return prefill, (time.perf_counter() - start) / STEPS


@torch.inference_mode()
def fits(model: Any, batch: int, tokens: int) -> bool:
    """Whether the last chunk of a prefill runs under the cap."""
    config = model.config
    shape = batch, config.num_key_value_heads, tokens - CHUNK, config.hidden_size // config.num_attention_heads
    try:
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            cache.update(*(torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)), layer)
        model(
            input_ids=torch.zeros(batch, CHUNK, dtype=torch.long, device="cuda"),
            past_key_values=cache,
            logits_to_keep=1,
        )
    except torch.OutOfMemoryError:
        return False
    return True


def largest(model: Any, tokens: int) -> int:
    """The largest batch that fits."""
    batch = 0
    while fits(model, batch + 1, tokens):
        batch += 1
        torch.cuda.empty_cache()
    torch.cuda.empty_cache()
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--cap", default="4GB")
    options = parser.parse_args()
    total = torch.cuda.get_device_properties(0).total_memory
    model = build(options.shape)
    torch.cuda.set_per_process_memory_fraction(parse_bytes(options.cap) / total)
    for how in ("as shipped", "page-locked by hand"):
        if how != "as shipped":
            for parameter in model.parameters():
                parameter.data = parameter.data.pin_memory()
        offloaded = cpu_offload(model, execution_device=torch.device("cuda", 0))
        batch = largest(offloaded, options.tokens)
        if batch == 0:
            print(f"{how}: not even one document fits {options.cap}")
            return
        prefill, step = measure(offloaded, batch, options.tokens)
        batches = ceil(options.documents / batch)
        seconds = batches * (prefill + options.answer * step)
        print(
            f"{how}: batch {batch}; prefill {prefill:.2f} s, step {1e3 * step:.0f} ms; {batches} x ({prefill:.2f} + "
            f"{options.answer} x {step:.3f}) = {seconds:,.0f} s"
        )
        remove_hook_from_submodules(model)


if __name__ == "__main__":
    main()
