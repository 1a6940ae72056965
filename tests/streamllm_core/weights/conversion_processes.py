"""Processes that convert a GGUF, for tests that kill them or let them race.

They are forked from a server that has imported the package once: importing torch anew takes seconds each time.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np


def start(target: Callable[[Path, Path, Connection], None], path: Path, cache: Path) -> tuple[BaseProcess, Connection]:
    """Run `target` in a process of its own; what it sends comes out of the connection."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["streamllm_core.weights"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(path, cache, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def convert_slowly(path: Path, cache: Path, result: Connection) -> None:
    """Convert with a pause before each tensor; send the folder."""
    from streamllm_core.weights import open_source
    from streamllm_core.weights.gguf_file import GGUFFile

    pieces = GGUFFile.pieces

    def slowly(self: GGUFFile, name: str, order: Any = None) -> Iterator[np.ndarray]:
        time.sleep(0.05)
        yield from pieces(self, name, order)

    GGUFFile.pieces = slowly
    os.environ["STREAMLLM_CACHE"] = str(cache)
    result.send(open_source(path).config_dir)


def measure_conversion(path: Path, cache: Path, result: Connection) -> None:
    """Convert; send by how many bytes the peak of resident memory rose meanwhile.

    tiny.gguf beside it is converted first, so that what is measured is not code being loaded.
    """
    from streamllm_core.weights import open_source

    os.environ["STREAMLLM_CACHE"] = str(cache)
    open_source(path.with_name("tiny.gguf"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    open_source(path)
    result.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


def measure_quantization(path: Path, cache: Path, result: Connection) -> None:
    """Quantize the model folder at `path`; send by how many bytes the peak of resident memory rose meanwhile.

    The folder "tiny" beside it is quantized first, so that what is measured is not code being loaded.
    """
    import torch

    from streamllm_core.skeleton import Skeleton, read_config
    from streamllm_core.weights import open_source
    from streamllm_core.weights.quantized import quantize_source

    os.environ["STREAMLLM_CACHE"] = str(cache)
    torch.set_num_threads(1)
    for folder in (path.with_name("tiny"), path):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        source = open_source(folder)
        quantize_source(source, Skeleton(read_config(source), torch.bfloat16), "int4", torch.bfloat16)
    result.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
