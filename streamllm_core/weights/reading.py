"""Stored bytes read from disk straight to where they are wanted, several pieces at a time.

Page faults of a mapping bring a few dozen kilobytes each and leave a fast disk idle in between; so does a single thread
that reads and copies in turn. Here threads read pieces of a few megabytes, each through a file descriptor of its own
(the kernel's readahead is kept per descriptor, and interleaved readers would confuse it).

O_DIRECT would save the copy out of the page cache, but it wants file offset, address and length to be multiples of the
disk's block, and tensors begin anywhere in a file: they would have to be read into a bounce buffer and copied from
there, which is the very copy that was to be saved. What matters of it, that a model larger than RAM must not drive
everything else out of the page cache, ``drop_behind`` does as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from streamllm_core.errors import ModelError

THREADS = 8
PIECE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class FileRange:
    """``nbytes`` bytes from ``offset`` on, of a file that was last modified at ``mtime_ns`` (None: at any time)."""

    path: Path
    offset: int
    nbytes: int
    mtime_ns: int | None = None


class RangeReader:
    """Reads file ranges into memory; may be used from any thread."""

    def __init__(self, *, drop_behind: bool = False, threads: int = THREADS) -> None:
        """``drop_behind``: what has been read leaves the page cache, where it would not live to be read again."""
        self.drop_behind = drop_behind
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="range-reader")

    def read(self, wanted: Iterable[tuple[FileRange, Tensor]]) -> None:
        """Fill each tensor (contiguous, on the CPU, as many bytes as its range) with the bytes of its range.

        Raises ModelError, with the file's name, when a file cannot be read or ends too soon.
        """
        futures = [
            self._threads.submit(_read_piece, piece, memory, self.drop_behind)
            for span, target in wanted
            for piece, memory in _pieces(span, target)
        ]
        for future in futures:  # all of them, before an error is raised: none may go on writing behind our back
            future.exception()
        for future in futures:
            future.result()


def drop_from_page_cache(path: Path, nbytes: int = 0) -> None:
    """Have the next read of a file's first bytes (0: all) come from the disk, where the system knows how to. What was
    written is synced."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        _forget(file.fileno(), 0, nbytes)


def _pieces(span: FileRange, target: Tensor) -> Iterable[tuple[FileRange, memoryview]]:
    if target.nbytes != span.nbytes:
        raise ValueError(f"{span.nbytes} bytes of {span.path} do not fill a tensor of {target.nbytes}")
    if span.nbytes == 0:
        return
    memory = target.detach().view(-1).view(torch.uint8).numpy().data
    for start in range(0, span.nbytes, PIECE_BYTES):
        length = min(PIECE_BYTES, span.nbytes - start)
        yield replace(span, offset=span.offset + start, nbytes=length), memory[start : start + length]


def _read_piece(piece: FileRange, memory: memoryview, drop_behind: bool) -> None:
    try:
        with piece.path.open("rb", buffering=0) as file:
            if piece.mtime_ns not in (None, os.fstat(file.fileno()).st_mtime_ns):
                raise ModelError(f"{piece.path}: has changed since the model was opened; start again")
            file.seek(piece.offset)
            done = 0
            while done < piece.nbytes:
                count = file.readinto(memory[done:])
                if not count:
                    raise ModelError(
                        f"{piece.path}: ended at byte {piece.offset + done:,} while weights were read; was it replaced "
                        "meanwhile?"
                    )
                done += count
            if drop_behind:
                _forget(file.fileno(), piece.offset, piece.nbytes)
    except OSError as error:
        raise ModelError(f"{piece.path}: cannot be read ({error.strerror})") from error


def _forget(descriptor: int, offset: int, nbytes: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)
