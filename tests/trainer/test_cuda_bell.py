"""The bell of memory on GPUs, with a driver that only writes down what it is asked."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from refit_protocol.bell import AWAITED_OFFSET_BYTES, BELL_BYTES, WORD_STRIDE_BYTES
from refit_trainer import cuda_bell
from refit_trainer.cuda_bell import CudaBell

WORKERS = 2
CURRENT, OTHER = 0, 1


class Device:
    """Two devices and their driver. `said` is what was asked, with the device that was current then."""

    def __init__(self) -> None:
        self.current = CURRENT
        self.busy: set[int] = set()
        self.ringing = 0
        self.answers: dict[str, int] = {}
        self.said: list[tuple[str, int]] = []

    def __getattr__(self, function: str) -> Any:
        def answer(*_: object) -> int:
            self.said.append((function, self.current))
            return self.answers.get(function, 0)

        return answer

    @contextmanager
    def entered(self, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before

    def stream(self) -> Stream:
        return Stream(self)

    def query(self, stream: int) -> int:
        assert stream == 0, "a default stream has no handle of its own"
        return 600 if self.current in self.busy else 0

    def asked(self, function: str) -> list[int]:
        return [device for said, device in self.said if said == function]


class Stream:
    cuda_stream = 0

    def __init__(self, device: Device) -> None:
        self._device = device

    def query(self) -> bool:
        return True

    def record_event(self) -> Stream:
        self._device.ringing += 1
        return Event(self._device)


class Event(Stream):
    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._device.said.append(("synchronize", self._device.current))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(cuda_bell, "_driver", lambda: device)
    monkeypatch.setattr(cuda_bell, "_stream_query", lambda: device.query)
    monkeypatch.setattr(torch.cuda, "device", device.entered)
    monkeypatch.setattr(torch.cuda, "current_stream", device.stream)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    return device


def bell_of(*devices: int) -> CudaBell:
    bell = CudaBell([torch.device("cuda", index) for index in devices])
    bell.make_ready()
    return bell


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("refit-bell")


def test_what_nobody_holds_is_given_back(device: Device) -> None:
    """Once, before the memory itself goes."""
    before = mapped()
    bell = bell_of(OTHER)
    bell.make_ready()
    assert device.asked("cuMemHostRegister_v2") == [OTHER]
    assert mapped() == before + 1
    device.said.clear()
    del bell
    gc.collect()
    assert device.said == [("cuMemHostUnregister", OTHER)]
    assert mapped() == before


def test_a_stream_that_has_yet_to_ring_is_waited_for(device: Device) -> None:
    """Also one that an idle stream has overtaken."""
    bell = bell_of(OTHER)
    device.busy = {OTHER}
    bell.ring(7, WORKERS)
    assert device.asked("cuStreamWriteValue32_v2") == [OTHER] * WORKERS
    device.busy = set()
    bell.ring(8, WORKERS)
    device.said.clear()
    del bell
    gc.collect()
    assert [said for said, _ in device.said] == ["synchronize", "cuMemHostUnregister"]


def test_a_forked_child_gives_nothing_back(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the parent's objects and no device."""
    bell = bell_of(OTHER)
    device.said.clear()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del bell
    gc.collect()
    assert device.said == []


@pytest.mark.parametrize("function", ["cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2"])
def test_memory_that_no_device_can_see_is_not_kept(device: Device, function: str) -> None:
    """The processor rings where nothing is under way, and nothing does where something is."""
    device.answers[function] = 801
    bell = bell_of(OTHER)
    assert len(device.asked("cuMemHostUnregister")) == (function != "cuMemHostRegister_v2")
    bell.ring(7, WORKERS)
    bell.await_ringing()
    device.busy = {OTHER}
    bell.ring(8, WORKERS)
    assert not device.asked("cuStreamWriteValue32_v2")
    device.said.clear()
    del bell
    gc.collect()
    assert device.said == []


@pytest.mark.parametrize("devices", [(OTHER,), (CURRENT, OTHER)])
def test_the_device_that_is_asked_is_the_parameters_own(device: Device, devices: tuple[int, ...]) -> None:
    """Whichever is current: a copy that began while another is busy would read half-written weights."""
    bell = bell_of(*devices)
    words = torch.from_file(f"/proc/self/fd/{bell.segment.fd}", shared=True, size=BELL_BYTES, dtype=torch.uint8)
    device.busy = {OTHER}
    bell.ring(7, WORKERS)
    assert words[0] == 0
    device.busy = set()
    bell.ring(7, WORKERS)
    assert words[0] == 7


def test_what_stands_by_is_rung_for_by_its_own_number(device: Device) -> None:
    """In the lines of those workers that are ready; the others hear of it by the commit."""
    bell = bell_of(OTHER)
    words = torch.from_file(f"/proc/self/fd/{bell.segment.fd}", shared=True, size=BELL_BYTES, dtype=torch.uint8)
    lines = words.view(torch.int32).reshape(-1, WORD_STRIDE_BYTES // 4)
    assert not bell.ring_awaited()
    lines[:WORKERS, AWAITED_OFFSET_BYTES // 4] = 9
    assert bell.ring_awaited()
    assert lines[: WORKERS + 1, 0].tolist() == [9] * WORKERS + [0]
