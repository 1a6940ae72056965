"""A file mapped read-only, so that the kernel does not count it as memory that might be written, and so that one larger
than RAM maps at all; pages can be given back piece by piece, so that reading a model from disk for hours does not
show as gigabytes of resident memory."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np
import torch

from streamllm_core.errors import ModelError


class MappedFile:
    """Bytes of a file as tensors; it is mapped when they are first asked for. May be used from any thread."""

    def __init__(self, path: Path, size: int) -> None:
        """``size`` is what the file had when its header was read."""
        self._path = path
        self._size = size
        self._lock = threading.Lock()
        self._map: mmap.mmap | None = None

    def bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        """A view, uint8 [nbytes], whose bytes are read when they are first touched.

        It must not be written to: the operating system ends a process that tries. Raises ModelError when the file
        cannot be mapped or has another size by now.
        """
        return torch.from_numpy(np.asarray(_Exposed(self._mapped(), offset, nbytes)))

    def release(self, offset: int, nbytes: int) -> None:
        """Give back the process's pages of these bytes; later reads fetch them from the page cache or the disk.

        Only pages that lie wholly inside go: one that is shared with a neighbour may be in use there.
        """
        advice = getattr(mmap, "MADV_DONTNEED", None)
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if advice is not None and start < stop:
            self._mapped().madvise(advice, start, stop - start)

    def _mapped(self) -> mmap.mmap:
        with self._lock:
            if self._map is None:
                self._map = self._open()
            return self._map

    def _open(self) -> mmap.mmap:
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != self._size:
                    raise ModelError(f"{self._path}: its size has changed since it was opened; was it replaced?")
                return mmap.mmap(file.fileno(), self._size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{self._path}: cannot be mapped into memory ({error.strerror})") from error


class _Exposed:
    """Bytes of a read-only mapping, which it keeps, in a form that torch takes without warning about writes."""

    def __init__(self, mapped: mmap.mmap, offset: int, nbytes: int) -> None:
        self._bytes = np.frombuffer(mapped, dtype=np.uint8, count=nbytes, offset=offset)  # keeps the mapping
        address, _ = self._bytes.__array_interface__["data"]
        self.__array_interface__ = self._bytes.__array_interface__ | {"data": (address, False)}
