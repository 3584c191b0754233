from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sync_recorder import SyncRecorder
from torch import Tensor

VALUES = torch.tensor([3.0, 1.0, 2.0])
ONES = torch.tensor([0, 2])
MASK = torch.tensor([True, False, True])

WAITING: list[Callable[[], object]] = [
    lambda: VALUES[0].item(),
    lambda: VALUES.tolist(),
    lambda: VALUES.cpu(),
    lambda: VALUES.numpy(),
    lambda: np.asarray(VALUES),
    lambda: VALUES.to("cpu"),
    lambda: VALUES.to(device=torch.device("cpu")),
    lambda: bool((VALUES > 1).any()),
    lambda: int(VALUES[0]),
    lambda: float(VALUES.max()),
    lambda: range(ONES[1]),
    lambda: max(VALUES),
    lambda: f"{VALUES[0]}",
    lambda: VALUES[MASK],
    lambda: VALUES[[0, 2]],
    lambda: VALUES.nonzero(),
    lambda: MASK.argwhere(),
    lambda: torch.where(MASK),
    lambda: torch.where(MASK, VALUES, -1),
    lambda: VALUES.masked_select(MASK),
    lambda: ONES.bincount(),
    lambda: ONES.repeat_interleave(ONES),
    lambda: torch.equal(VALUES, VALUES),
    lambda: torch.tensor([1, 2]),
    lambda: torch.as_tensor([1, 2]),
    lambda: torch.from_numpy(np.zeros(2)),
    lambda: VALUES.new_tensor([1.0]),
    lambda: VALUES.clone().index_put_((ONES,), VALUES[:2], accumulate=True),
    lambda: VALUES.clone().__setitem__(ONES, 1.0),
]

FREE: list[Callable[[], object]] = [
    lambda: VALUES.argmax(dim=-1),
    lambda: VALUES[1:],
    lambda: VALUES[ONES],
    lambda: VALUES.index_select(0, ONES),
    lambda: VALUES.to(torch.int64),
    lambda: torch.where(MASK, VALUES, -VALUES),
    lambda: VALUES.masked_fill(MASK, -1),
    lambda: torch.zeros(3) + VALUES.sort().values * 2,
    lambda: torch.arange(3, device="cpu"),
    lambda: VALUES.shape[0] + len(VALUES),
    lambda: VALUES.unbind(),
]


@pytest.mark.parametrize("call", WAITING)
def test_what_would_wait_is_noted(call: Callable[[], object]) -> None:
    with SyncRecorder() as recorder:
        call()
    assert recorder.calls


@pytest.mark.parametrize("call", FREE)
def test_what_stays_on_the_device_is_not(call: Callable[[], object]) -> None:
    with SyncRecorder() as recorder:
        call()
    assert recorder.calls == []


def test_what_is_expected_is_counted_and_nothing_is_seen_outside() -> None:
    def upload() -> Tensor:
        return torch.from_numpy(np.ones(2))

    with SyncRecorder() as recorder:
        assert recorder.expecting(upload)().sum() is not None
        assert recorder.calls == []
        upload()
    VALUES.tolist()
    upload()
    assert recorder.num_expected == 1
    assert recorder.calls == ["from_numpy"]
