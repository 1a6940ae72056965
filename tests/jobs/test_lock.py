"""One holder at a time, across processes, until it is dead."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.errors import LockedError
from jobs.lock import RunLock

Start = Callable[..., "subprocess.Popen[str]"]


def test_a_second_holder_is_told_of_the_first(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.acquire()
    with pytest.raises(LockedError, match=f"process {os.getpid()} on {socket.gethostname()} since 20") as caught:
        second.acquire()
    assert caught.value.exit_code == 75
    assert caught.value.holder["pid"] == os.getpid()
    first.release()
    assert first.holder() == {}
    second.acquire()
    second.release()
    second.release()


def test_a_run_is_refused_at_once_and_admitted_when_the_holder_is_killed(tmp_path: Path, start: Start) -> None:
    output = tmp_path / "out.jsonl"
    holder = start(output, "--delay", 300)
    assert holder.stdout is not None and holder.stdout.readline() == f"open {holder.pid}\n"
    begun = time.monotonic()
    refused = start(output)
    _, complaint = refused.communicate(timeout=20)
    assert refused.returncode == 75
    assert f"process {holder.pid} on {socket.gethostname()}" in complaint
    assert time.monotonic() - begun < 5
    assert holder.poll() is None
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    successor = start(output)
    assert successor.communicate(timeout=30)[0].startswith("open")
    assert successor.returncode == 0


def test_without_its_file_the_holder_is_unknown(tmp_path: Path) -> None:
    first = RunLock(tmp_path)
    first.acquire()
    (tmp_path / "lock.json").write_bytes(b"{torn")
    with pytest.raises(LockedError, match="by another process") as caught:
        RunLock(tmp_path).acquire()
    assert caught.value.holder == {}
    first.release()
