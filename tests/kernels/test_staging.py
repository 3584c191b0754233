from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from relaykv.kernels.staging import Staging

CPU = torch.device("cpu")


def _arrays() -> list[NDArray[Any]]:
    return [
        np.arange(5, dtype=np.int64),
        np.array([3], dtype=np.int32),
        np.zeros(0, dtype=np.int64),
        np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4),
        np.arange(7, dtype=np.int32),
    ]


@pytest.mark.parametrize("packed", [False, True])
def test_an_upload_keeps_values_types_shapes_and_order(packed: bool) -> None:
    arrays = _arrays()

    tensors = Staging(CPU, packed=packed).upload(arrays)

    assert len(tensors) == len(arrays)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_all_arrays_of_an_upload_come_over_in_one_copy() -> None:
    staging = Staging(CPU, packed=True)

    staging.upload(_arrays())
    staging.upload(_arrays())

    assert staging.num_copies == 2


def test_arrays_start_at_addresses_that_wide_reads_can_use() -> None:
    tensors = Staging(CPU, packed=True).upload(_arrays())

    starts = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
    assert all((start - starts[0]) % 16 == 0 for start in starts)


def test_a_later_upload_leaves_an_earlier_one_as_it_is() -> None:
    staging = Staging(CPU, num_buffers=1, packed=True)

    (first,) = staging.upload([np.arange(10)])
    staging.upload([np.full(10, -1)])

    assert first.tolist() == list(range(10))


def test_an_upload_larger_than_the_buffer_gets_a_larger_one() -> None:
    array = np.arange(100_000)

    (tensor,) = Staging(CPU, packed=True).upload([array])

    np.testing.assert_array_equal(tensor.numpy(), array)


def test_uploading_nothing_copies_nothing() -> None:
    staging = Staging(CPU, packed=True)

    (tensor,) = staging.upload([np.zeros((0, 3), dtype=np.float32)])

    assert tensor.shape == (0, 3)
    assert staging.num_copies == 0
