from __future__ import annotations

import pytest
import torch
from torch import Tensor

from relaykv.kernels.readback import start_readback


def test_on_a_cpu_nothing_is_copied() -> None:
    values = torch.arange(5)
    assert start_readback(values)() is values


class _DeviceTensor(Tensor):
    """Says that it is on a CUDA device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


def test_on_a_device_one_copy_starts_at_once_and_only_its_end_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    class Event:
        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("synchronize")

    class Host:
        def copy_(self, values: Tensor, *, non_blocking: bool) -> None:
            assert non_blocking
            log.append(f"copy {values.tolist()}")

    def empty(shape: torch.Size, *, dtype: torch.dtype, pin_memory: bool) -> Host:
        assert (tuple(shape), dtype, pin_memory) == ((3,), torch.int32, True)
        return Host()

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    values = torch.arange(3, dtype=torch.int32).as_subclass(_DeviceTensor)
    wait = start_readback(values)
    assert log == ["copy [0, 1, 2]", "record"]
    assert isinstance(wait(), Host)
    assert log[2:] == ["synchronize"]
