from __future__ import annotations

import pytest
import torch

from relaykv.engine.decode_graphs import graph_sizes
from relaykv.engine.device import choose_device, choose_dtype, choose_kernels, device_config
from relaykv.engine.options import EngineOptions

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def test_without_a_gpu_auto_means_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert choose_device("auto") == CPU


def test_with_a_gpu_auto_means_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    assert choose_device("auto") == CUDA


@pytest.mark.parametrize(
    ("name", "why"),
    [("tpu", "unknown"), ("mps", "not supported"), ("cuda", "no CUDA"), ("cuda:0", "no CUDA")],
)
def test_a_device_that_is_not_here_is_refused_by_name(
    name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ValueError, match=why):
        choose_device(name)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="2 CUDA devices"):
        choose_device("cuda:2")


def test_the_type_follows_the_device() -> None:
    assert choose_dtype("auto", CPU) is torch.float32
    assert choose_dtype("auto", CUDA) is torch.bfloat16
    assert choose_dtype("float16", CUDA) is torch.float16


@pytest.mark.parametrize(("name", "device"), [("int8", CPU), ("float32", CUDA)])
def test_a_type_that_attention_does_not_have_is_refused(name: str, device: torch.device) -> None:
    with pytest.raises(ValueError, match=name):
        choose_dtype(name, device)


def test_a_gpu_without_its_kernels_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'flashinfer'")

    monkeypatch.setattr("relaykv.engine.device.cuda_kernels", missing)

    with pytest.raises(ValueError, match=r"relaykv\[cuda\].*flashinfer"):
        choose_kernels(CUDA)


def test_a_cpu_neither_overlaps_nor_records_graphs() -> None:
    config = device_config(EngineOptions(), CPU)

    assert not config.overlap
    assert not config.graph_sizes
    assert config.influence_layer_stride == config.influence_step_stride == 1


def test_a_gpu_does_both_unless_told_otherwise() -> None:
    config = device_config(EngineOptions(max_num_requests=12), CUDA)
    plain = device_config(EngineOptions(overlap=False, cuda_graphs=False), CUDA)

    assert config.overlap
    assert config.graph_sizes == (1, 2, 4, 8, 12)
    assert not plain.overlap
    assert not plain.graph_sizes


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20))]
)
def test_graph_sizes_are_dense_where_padding_would_hurt(most: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(most) == sizes
