"""The wrapper of FlashInfer's top-k, over a stand-in for its kernel: nothing runs on a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from relaykv.kernels.sampling import cuda_filters, filter_top_k, filter_top_p

TOP_K = torch.tensor([1, 2, 7, 40, 299])


@pytest.fixture
def calls(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    request.getfixturevalue("flashinfer_installed")
    from sampling_stand_in import sampling_stand_in

    with sampling_stand_in() as done:
        yield done


@pytest.fixture
def top_k(calls: list[str]) -> Callable[[Tensor, Tensor, int], Tensor]:
    filter_ = cuda_filters().top_k
    assert calls == ["build"]
    return filter_


def _logits(vocab_size: int = 300, *, rounded: bool = False) -> Tensor:
    logits = torch.randn(len(TOP_K), vocab_size, generator=torch.Generator().manual_seed(3)) * 3
    return logits.round() if rounded else logits  # rounding makes many ties


def test_the_module_is_built_when_the_filter_is_made_and_not_by_a_request(
    calls: list[str],
) -> None:
    filters = cuda_filters()
    assert calls == ["build"]
    filters.top_k(_logits(), TOP_K, 299)
    assert calls == ["build", "top_k_mask_logits"]
    assert filters.top_p is filter_top_p


@pytest.mark.parametrize("rounded", [False, True])
def test_the_result_is_that_of_plain_torch_also_where_logits_are_equal(
    top_k: Callable[[Tensor, Tensor, int], Tensor], rounded: bool
) -> None:
    logits = _logits(rounded=rounded)
    before = logits.clone()
    found = top_k(logits, TOP_K, 299)
    assert torch.equal(found, filter_top_k(logits, TOP_K, 299))
    assert torch.isfinite(found).sum(dim=-1).tolist() == TOP_K.tolist()
    assert torch.equal(logits, before)


def test_what_a_grammar_has_dropped_stays_dropped(
    top_k: Callable[[Tensor, Tensor, int], Tensor],
) -> None:
    logits = _logits(rounded=True)
    logits[:, 4:] = float("-inf")  # fewer are left than most rows would keep
    found = top_k(logits, TOP_K, 299)
    assert torch.equal(found, filter_top_k(logits, TOP_K, 299))
    assert torch.isfinite(found).sum(dim=-1).tolist() == [1, 2, 4, 4, 4]


def test_logits_need_not_be_contiguous_and_k_may_exceed_the_vocabulary(
    top_k: Callable[[Tensor, Tensor, int], Tensor],
) -> None:
    logits = _logits(600)[:, ::2]
    values = torch.tensor([300, 1, 10_000, 2, 299])
    assert torch.equal(top_k(logits, values, 10_000), filter_top_k(logits, values, 10_000))


@pytest.mark.usefixtures("flashinfer_installed")
def test_flashinfer_still_offers_no_draw_from_a_given_number() -> None:
    # The reason that tokens are drawn by torch: should this fail, read the functions again.
    import flashinfer.sampling

    for name in ("sampling_from_probs", "sampling_from_logits", "top_p_sampling_from_probs"):
        function = getattr(flashinfer.sampling, name)
        assert not {"uniform", "uniform_samples"} & set(inspect.signature(function).parameters)
        documentation = " ".join(str(function.__doc__).split())
        assert "do not make sampling invariant to batch position" in documentation
