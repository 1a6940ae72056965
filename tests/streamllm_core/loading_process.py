"""Load a model folder in a process of its own and print, in bytes: how much its memory grew at most, and the layers.

python -m tests.streamllm_core.loading_process FOLDER pinned|resident float32|bfloat16
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from torch import Tensor

from streamllm_core import AutoModel
from streamllm_core.checkpoint import Checkpoint
from streamllm_core.links import CudaLink, link_from_host
from streamllm_core.memory.arena import ArenaLayout
from streamllm_core.memory.machine import measured_rates
from streamllm_core.memory.pinned import PinnedHostWeightRegistry
from streamllm_core.memory.scratchpad import GPUScratchpadPool
from streamllm_core.skeleton import Skeleton, read_config
from streamllm_core.weights import open_source
from tests.streamllm_core.simulated_bus import SimulatedBus


def memory(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def load_pinned(folder: Path, dtype: torch.dtype) -> tuple[int, object]:
    """The layers' bytes; as on a card, with a processor in the place of CUDA, and the link that keeps them."""
    source = open_source(folder)
    skeleton = Skeleton(read_config(source), dtype)
    checkpoint = Checkpoint(source, skeleton, rounded_to=dtype)
    layouts = [ArenaLayout.of(layer) for layer in skeleton.layers]

    def read(index: int, block: Tensor) -> None:
        checkpoint.fill(f"{skeleton.layers_prefix}{index}.", layouts[index], block)

    sizes = {index: layout.nbytes for index, layout in enumerate(layouts)}
    pool = GPUScratchpadPool(1, torch.device("cpu"))
    link = link_from_host(pool, sizes, PinnedHostWeightRegistry(SimulatedBus()), read)
    assert isinstance(link, CudaLink)
    return sum(sizes.values()), link


def main() -> None:
    folder, way, dtype = Path(sys.argv[1]), sys.argv[2], getattr(torch, sys.argv[3])
    measured_rates(torch.device("cpu"), dtype)  # loads what products need, which is no part of the model
    before = memory("VmRSS")
    if way == "pinned":
        held, kept = load_pinned(folder, dtype)
    else:
        kept = AutoModel.from_pretrained(folder, device="cpu", dtype=dtype)
        held = sum(value.nbytes for layer in kept._skeleton.layers for value in layer.parameters())
    print(memory("VmHWM") - before, held)


if __name__ == "__main__":
    main()
