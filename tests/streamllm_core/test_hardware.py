"""What is measured of a machine, and that what is not is said."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch

from streamllm_core import hardware
from streamllm_core.hardware import LinkRates
from tests.streamllm_core.simulated_bus import SimulatedBus

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "DISK_BYTES", 2**26)
    monkeypatch.setattr(hardware, "COPY_BYTES", 2**24)
    monkeypatch.setattr(hardware, "PROBE_BYTES", 2**22)
    monkeypatch.setattr(hardware, "LOCK_SECONDS", 60)


def test_the_report_of_a_processor(tmp_path: Path) -> None:
    report = hardware.measure(CPU, tmp_path / "new")
    for name in ("ram_copy_gb_s", "cpu_float32_tflops", "disk_read_gb_s", "ram_bytes"):
        value = report[name]
        assert isinstance(value, float | int)
        assert value > 0
    assert not list((tmp_path / "new").iterdir())
    assert len(hardware.table(report).splitlines()) == len(report)
    assert [line.split(":")[0] for line in hardware.not_measured(report)] == ["No CUDA device"]


def test_a_disk_without_room_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "DISK_BYTES", 10**18)
    report = hardware.measure(CPU, tmp_path)
    assert "disk_read_gb_s" not in report
    assert "Too little free space" in hardware.not_measured(report)[1]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file: cannot be written"):
        hardware.disk_rate(tmp_path / "file")


@pytest.mark.parametrize(("lockable", "found"), [(0, 0), (1, 1), (2, 1), (5, 3)])  # in blocks of 64 MiB: 1, 2, 4, …
def test_the_lock_trial_ends_at_a_refusal_and_gives_everything_back(lockable: int, found: int) -> None:
    bus = SimulatedBus(lockable=lockable * 2**26)
    assert hardware.lockable_bytes(bus) == (found * 2**26, True)
    assert not bus.locked


def test_the_lock_trial_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "LOCK_BYTES", 2**28)
    bus = SimulatedBus()
    locked, refused = hardware.lockable_bytes(bus)
    assert 0 < locked <= 2**28
    assert not refused
    assert not bus.locked


def test_link_rates_have_two_digits(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(2**23))
    rates = LinkRates.measure(CPU, torch.float32, file)
    for rate in (rates.host_to_device, rates.disk, rates.matmul, rates.memory):
        assert rate > 0
        assert rate == round(rate, 1 - math.floor(math.log10(rate)))
    assert LinkRates.measure(CPU, torch.float32).disk == hardware.COMMON_DISK


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_report_of_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # everything in full size
    device = torch.device("cuda", 0)
    report = hardware.measure(device, tmp_path)
    assert not hardware.not_measured(report)
    assert float(str(report["host_to_device_page_locked_gb_s"])) > 0
    begin = time.perf_counter()
    hardware.lockable_bytes(hardware.CudaBus(device))
    assert time.perf_counter() - begin < 2
    LinkRates.measure(device, torch.float16)
    begin = time.perf_counter()
    LinkRates.measure(device, torch.float16)
    assert time.perf_counter() - begin < 0.5
