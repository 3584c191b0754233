"""What FlashInfer's compiled modules expect of their raw arguments, checked, and what they compute.

FlashInfer itself checks almost none of it: on a device a broken rule is a wrong answer or an
illegal access. Each rule follows from its sources: batch_prefill.cu, batch_decode.cu, page.cuh,
scheduler.cuh and prefill.cuh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

# Query heads per key head that `DISPATCH_GQA_GROUP_SIZE` knows.
CUDA_CORE_RATIOS = (1, 2, 3, 4, 6, 8, 16)


class ContractError(AssertionError):
    """A compiled module was given what it would not have noticed."""


def require(condition: bool, rule: str) -> None:
    if not condition:
        raise ContractError(rule)


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """What a plan was made for; index arrays as they were then."""

    serial: int
    qo_indptr: tuple[int, ...]
    kv_indptr: tuple[int, ...]
    kv_lens: tuple[int, ...] | None  # the decode kernel's planner is not told
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    causal: bool
    cuda_graph: bool
    splits: bool

    def check(self) -> None:
        """What can be known before the device is involved."""
        for name, indptr in (("qo_indptr", self.qo_indptr), ("kv_indptr", self.kv_indptr)):
            require(indptr[0] == 0, f"{name} must begin with 0")
            rising = all(a <= b for a, b in pairwise(indptr))
            require(rising, f"{name} must not decrease")
        require(
            len(self.qo_indptr) == len(self.kv_indptr), "qo_indptr and kv_indptr differ in length"
        )
        require(len(self.qo_indptr) > 1, "a plan needs at least one request")
        require(self.num_heads % self.num_kv_heads == 0, "query heads must share key heads evenly")
        for request, kv_len in enumerate(self.kv_lens or ()):
            num_rows = self.qo_indptr[request + 1] - self.qo_indptr[request]
            num_pages = self.kv_indptr[request + 1] - self.kv_indptr[request]
            require(num_rows == 0 or kv_len > 0, "rows without keys")
            last = kv_len - (num_pages - 1) * self.page_size
            require(1 <= last <= self.page_size, "last_page_len must be 1 to page size")
            require(
                not self.causal or num_rows <= kv_len,
                "the causal mask takes rows to be the last positions: more rows than keys",
            )


def check_host_array(name: str, array: Tensor) -> None:
    require(array.dtype == torch.int32, f"{name} must be int32, is {array.dtype}")
    require(array.dim() == 1, f"{name} must have one dimension")
    require(array.is_contiguous(), f"{name} must be contiguous")
    require(array.device.type == "cpu", f"{name} is read on the host")


@dataclass(frozen=True, slots=True)
class Run:
    """The raw arguments of a kernel launch."""

    q: Tensor
    k: Tensor
    v: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor
    out: Tensor
    lse: Tensor | None
    layout: int
    window_left: int
    sm_scale: float

    def check(self, plan: PlannedBatch, dtype: torch.dtype) -> None:
        self._check_tensors(plan, dtype)
        self._check_indices(plan)

    def _check_tensors(self, plan: PlannedBatch, dtype: torch.dtype) -> None:
        for name, tensor in (("q", self.q), ("k", self.k), ("v", self.v), ("out", self.out)):
            require(tensor.dtype == dtype, f"{name} must be {dtype} as planned, is {tensor.dtype}")
            require(tensor.stride(-1) == 1, f"{name}'s head dimension must be dense")
            aligned = tensor.data_ptr() % 16 == 0 and all(
                stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1]
            )
            require(aligned, f"{name}'s rows must begin at multiples of 16 bytes")
        rows = plan.qo_indptr[-1]
        require(
            self.q.shape == (rows, plan.num_heads, plan.head_dim),
            f"q {tuple(self.q.shape)} is not [rows, heads, head dim] as planned",
        )
        require(self.out.shape == self.q.shape, "out must have q's shape")
        require(self.out.is_contiguous(), "out must be contiguous")
        require(self.layout == 0, "the layout must be NHD")
        require(self.k.stride() == self.v.stride(), "keys and values must have equal strides")
        for name, pages in (("k", self.k), ("v", self.v)):
            require(
                pages.shape[1:] == (plan.page_size, plan.num_kv_heads, plan.head_dim),
                f"{name} {tuple(pages.shape)} is not [pages, page size, heads, dim] as planned",
            )
        require(self.k.shape == self.v.shape, "keys and values must have one shape")
        require(self.window_left == -1, "no window was planned")
        require(self.sm_scale > 0, "a scale")
        if self.lse is not None:
            right = self.lse.dtype == torch.float32 and self.lse.shape == self.q.shape[:2]
            require(right and self.lse.is_contiguous(), "lse must be fp32 [rows, heads]")

    def _check_indices(self, plan: PlannedBatch) -> None:
        for name, array in (
            ("qo_indptr", self.qo_indptr),
            ("kv_indptr", self.kv_indptr),
            ("kv_indices", self.kv_indices),
            ("last_page_len", self.last_page_len),
        ):
            require(array.dtype == torch.int32, f"{name} must be int32, is {array.dtype}")
            require(array.dim() == 1, f"{name} must have one dimension")
            require(array.is_contiguous(), f"{name} must be contiguous")
        require(
            tuple(self.qo_indptr.tolist()) == plan.qo_indptr, "qo_indptr is not what was planned"
        )
        require(
            tuple(self.kv_indptr.tolist()) == plan.kv_indptr, "kv_indptr is not what was planned"
        )
        num_pages = plan.kv_indptr[-1]
        require(len(self.last_page_len) == len(plan.kv_indptr) - 1, "one last_page_len a request")
        last = self.last_page_len.tolist()
        in_page = all(1 <= length <= plan.page_size for length in last)
        require(in_page, "last_page_len must be 1 to page size")
        require(len(self.kv_indices) >= num_pages, "kv_indices is shorter than kv_indptr says")
        pages = self.kv_indices[:num_pages]
        exist = not num_pages or (int(pages.min()) >= 0 and int(pages.max()) < len(self.k))
        require(exist, "kv_indices must name pages that exist")
        for request, num_keys in enumerate(self.num_keys()):
            num_rows = plan.qo_indptr[request + 1] - plan.qo_indptr[request]
            require(num_rows == 0 or num_keys > 0, "rows without keys")

    def num_keys(self) -> list[int]:
        page_size = self.k.shape[1]
        pages = self.kv_indptr.diff()
        lengths: list[int] = ((pages - 1) * page_size + self.last_page_len).tolist()
        return lengths

    def attend(self, visible: Callable[[int, int, int], Tensor | None]) -> None:
        """Computes what the kernel does, with sums in fp32, into `out` and `lse` (base 2).

        Args:
            visible: (first row, number of rows, number of keys) -> bool [rows, keys], or None for
                all of them.
        """
        q_starts, kv_starts = self.qo_indptr.tolist(), self.kv_indptr.tolist()
        num_kv_heads = self.k.shape[2]
        for request, num_keys in enumerate(self.num_keys()):
            first, stop = q_starts[request : request + 2]
            pages = self.kv_indices[kv_starts[request] : kv_starts[request + 1]].long()
            keys, values = (  # [kv heads, keys, head dim]
                cache[pages].flatten(0, 1)[:num_keys].float().transpose(0, 1)
                for cache in (self.k, self.v)
            )
            rows = self.q[first:stop].float()
            rows = rows.view(len(rows), num_kv_heads, -1, rows.shape[2])  # [n, kv, gqa, d]
            scores = torch.einsum("nkgd,kmd->kgnm", rows, keys) * self.sm_scale
            mask = visible(first, stop - first, num_keys)
            if mask is not None:
                require(bool(mask.any(dim=1).all()), "every row must see a key")
                scores = scores.masked_fill(~mask, -torch.inf)
            attended = torch.einsum("kgnm,kmd->nkgd", scores.softmax(-1), values)
            self.out[first:stop] = attended.flatten(1, 2).to(self.out.dtype)
            if self.lse is not None:
                sums = scores.logsumexp(-1) / torch.log(torch.tensor(2.0))
                self.lse[first:stop] = sums.permute(2, 0, 1).flatten(1)


def causal_mask(num_rows: int, num_keys: int) -> Tensor:
    """FlashInfer's: the last row is aligned with the last key."""
    return torch.ones(num_rows, num_keys, dtype=torch.bool).tril(num_keys - num_rows)


def position_mask(run: Run, q_pos: Tensor) -> Callable[[int, int, int], Tensor]:
    """What the scattered variant computes, from its tensor of positions."""
    require(q_pos.dtype == torch.int32, f"q_pos must be int32, is {q_pos.dtype}")
    require(q_pos.shape == (len(run.q),), "q_pos must have one position a row")
    require(q_pos.is_contiguous(), "q_pos must be contiguous")

    def visible(first: int, num_rows: int, num_keys: int) -> Tensor:
        positions = q_pos[first : first + num_rows]
        in_range = int(positions.min()) >= 0 and int(positions.max()) < num_keys
        require(in_range, "q_pos must lie among the keys of the row's group")
        require(bool((positions.diff() > 0).all()), "q_pos must rise within a group")
        return torch.arange(num_keys) <= positions[:, None]

    return visible
