"""Attention through FlashInfer's Python wrappers, with its compiled modules stood in for.

What is shown: index arrays, arguments, masks and the use of the wrappers are right. What a kernel
computes on a device is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from attention_cases import (
    BLOCK,
    attention_batch,
    batch_attention,
    dense_attention,
    prepared,
    random_cache,
    random_tables,
)
from flashinfer_contract import ContractError
from flashinfer_stand_in import StandIn, flashinfer_stand_in
from torch import Tensor

from relaykv.kernels.attention import AttentionBatch
from relaykv.kernels.attention_flashinfer import FlashInferAttention
from relaykv.kernels.attention_torch import TorchAttention
from relaykv.kernels.influence import add_influence

pytestmark = pytest.mark.usefixtures("flashinfer_installed")

# Half a step of the type between 2 and 4, which the results of one-key rows reach, and a bit.
_ROUNDING = {torch.float16: 0.0011, torch.bfloat16: 0.0085}
# The torch backend rounds probabilities, too.
_TORCH_ROUNDING = {torch.float16: 0.004, torch.bfloat16: 0.03}

_SHAPES = {"gqa 3": (9, 3, 64), "gqa 1": (4, 4, 64), "gqa 4": (8, 2, 128), "gqa 7": (14, 2, 64)}

# Positions of each request's rows, how many requests decode, and how many are dense.
_BATCHES: dict[str, tuple[list[list[int]], int, int]] = {
    "one token, decoding": ([[0]], 1, 0),
    "one token, dense": ([[0]], 0, 1),
    "one token, scattered": ([[0]], 0, 0),
    "decodes around block boundaries": ([[14], [15], [16], [31], [32], [200]], 6, 0),
    "dense prompts of a block, one more and one less": (
        [list(range(16)), list(range(17)), list(range(15))],
        0,
        3,
    ),
    "dense chunks behind a prefix": ([list(range(70, 170)), [207], list(range(31, 33))], 0, 3),
    "scattered rows of two segments": ([[4, 5, 6, 40, 41, 90, 127, 128, 200]], 0, 0),
    "more scattered rows than a group": ([[2 * i + 1 for i in range(100)]], 0, 0),
    "scattered rows without a gap": ([list(range(20, 90))], 0, 0),
    "scattered requests beside each other": ([[3, 15, 16], [0], list(range(0, 208, 9))], 0, 0),
    "all kinds at once": (
        [[7], [199], list(range(20, 90)), list(range(5)), [33, 34, 36], [2, 150]],
        2,
        2,
    ),
    "requests without rows of every kind": ([[], [9], [], [1, 2], [], [4, 8]], 2, 2),
}


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with flashinfer_stand_in() as stand_in:
        yield stand_in


def _attention(
    shape: tuple[int, int, int] = (9, 3, 64), dtype: torch.dtype = torch.float16, **options: object
) -> FlashInferAttention:
    settings: dict[str, object] = {"workspace_bytes": 1 << 20, **options}
    return FlashInferAttention(
        *shape,
        BLOCK,
        dtype,
        torch.device("cpu"),
        add_influence=add_influence,
        **settings,  # type: ignore[arg-type]
    )


def _inputs(
    shape: tuple[int, int, int], num_rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads, head_dim = shape
    q = torch.randn(num_rows, heads, head_dim, generator=torch.Generator().manual_seed(1))
    return q.to(dtype), *random_cache(kv_heads, head_dim, dtype)


@pytest.mark.parametrize("dtype", list(_ROUNDING), ids=str)
@pytest.mark.parametrize("shape", list(_SHAPES))
@pytest.mark.parametrize("stock_module", [False, True], ids=["variant", "stock"])
@pytest.mark.parametrize("name", list(_BATCHES))
@pytest.mark.usefixtures("stand_in")
def test_rows_attend_to_the_keys_at_or_before_their_position(
    name: str, stock_module: bool, shape: str, dtype: torch.dtype
) -> None:
    rows, num_decodes, num_dense = _BATCHES[name]
    tables = random_tables(len(rows))
    batch = attention_batch(rows, tables, num_decodes, num_dense)
    attention = _attention(_SHAPES[shape], dtype, stock_module=stock_module)
    q, k_cache, v_cache = _inputs(_SHAPES[shape], len(batch.row_positions), dtype)
    out = attention.run(prepared(attention, batch), q, k_cache, v_cache, None)
    assert out.dtype is dtype
    expected = batch_attention(q, k_cache, v_cache, rows, tables)
    assert (out - expected).abs().max() < _ROUNDING[dtype]
    in_torch = TorchAttention(*_SHAPES[shape], BLOCK, dtype)
    twin = in_torch.run(prepared(in_torch, batch), q, k_cache, v_cache, None)
    assert (out - twin).abs().max() < _TORCH_ROUNDING[dtype]


@pytest.mark.usefixtures("stand_in")
def test_scattered_rows_do_not_get_the_bottom_right_mask_of_cacheblend() -> None:
    # CacheBlend's and LMCache's code passes n scattered rows as one causal request, whose mask
    # takes them for the last n positions of it.
    positions, blocks = [3, 9, 17, 40, 41, 90], [5, 1, 8, 2, 0, 3]
    q, k_cache, v_cache = _inputs((9, 3, 64), len(positions), torch.float16)
    expected, _ = dense_attention(q, k_cache, v_cache, positions, blocks)
    naive = _attention()
    as_dense = attention_batch([positions], [blocks], num_dense=1)
    wrong = naive.run(prepared(naive, as_dense), q, k_cache, v_cache, None)
    assert (wrong - expected).abs().max() > 0.5
    for stock_module in (False, True):
        attention = _attention(stock_module=stock_module)
        plan = prepared(attention, attention_batch([positions], [blocks]))
        out = attention.run(plan, q, k_cache, v_cache, None)
        assert (out - expected).abs().max() < _ROUNDING[torch.float16]


@pytest.mark.usefixtures("stand_in")
def test_queries_may_be_a_slice_of_a_wider_projection() -> None:
    rows, num_decodes, num_dense = _BATCHES["all kinds at once"]
    batch = attention_batch(rows, random_tables(len(rows)), num_decodes, num_dense)
    attention = _attention()
    q, k_cache, v_cache = _inputs((15, 3, 64), len(batch.row_positions), torch.float16)
    plan = prepared(attention, batch)
    out = attention.run(plan, q[:, :9], k_cache, v_cache, None)
    assert out.is_contiguous()
    assert torch.equal(out, attention.run(plan, q[:, :9].contiguous(), k_cache, v_cache, None))


def test_a_scattered_group_fills_one_tile_and_sees_no_further_than_its_last_row(
    stand_in: StandIn,
) -> None:
    attention = _attention((14, 2, 64))  # 18 rows of 7 query heads a tile
    batch = attention_batch([[5 * i for i in range(40)]], random_tables(1))
    q, k_cache, v_cache = _inputs((14, 2, 64), 40, torch.float16)
    attention.run(prepared(attention, batch), q, k_cache, v_cache, None)
    (plan,) = stand_in.plans
    assert plan.qo_indptr == (0, 18, 36, 40)
    assert plan.kv_lens == (86, 176, 196)
    assert plan.kv_indptr == (0, 6, 17, 30)


def test_the_stock_module_takes_a_causal_request_per_run(stand_in: StandIn) -> None:
    attention = _attention(stock_module=True)
    batch = attention_batch([[0, 1, 2, 9, 10, 30]], random_tables(1))
    q, k_cache, v_cache = _inputs((9, 3, 64), 6, torch.float16)
    attention.run(prepared(attention, batch), q, k_cache, v_cache, None)
    (plan,) = stand_in.plans
    assert plan.causal
    assert (plan.qo_indptr, plan.kv_lens) == ((0, 3, 5, 6), (3, 11, 31))


@pytest.mark.parametrize("tensor_core_decode", [False, True], ids=["cuda cores", "tensor cores"])
@pytest.mark.parametrize("dtype", list(_ROUNDING), ids=str)
@pytest.mark.usefixtures("stand_in")
def test_influence_equals_the_torch_backends(dtype: torch.dtype, tensor_core_decode: bool) -> None:
    rows = [[37], [80], [20], [5, 6], [1, 30]]
    tables = [[3, 1, 9], [8, 7, 6, 5, 4, 0], [3, 1], [2], [11, 12]]  # two share blocks
    counts = [True, False, True, True, True]
    batch = attention_batch(rows, tables, num_decodes=3, num_dense=1, counts=counts)
    attention = _attention(dtype=dtype, tensor_core_decode=tensor_core_decode)
    in_torch = TorchAttention(9, 3, 64, BLOCK, dtype)
    q, k_cache, v_cache = _inputs((9, 3, 64), 7, dtype)
    received, expected = torch.zeros(2, len(k_cache))
    plan = prepared(attention, batch)
    first = attention.run(plan, q, k_cache, v_cache, received)
    attention.run(plan, 2 * q, k_cache, v_cache, received)
    twin_plan = prepared(in_torch, batch)
    in_torch.run(twin_plan, q, k_cache, v_cache, expected)
    in_torch.run(twin_plan, 2 * q, k_cache, v_cache, expected)
    # Exact sums of rows are the number of heads; the twin rounds its scores to the type.
    assert float(received.sum()) == pytest.approx(2 * 2 * 9, rel=1e-5)
    assert (received - expected).abs().max() < 10 * _ROUNDING[dtype]
    # Counting changes nothing else.
    assert torch.equal(first, attention.run(plan, q, k_cache, v_cache, None))


@pytest.mark.parametrize("shape", list(_SHAPES))
def test_ratios_of_heads_without_a_decode_kernel_take_tensor_cores(
    stand_in: StandIn, shape: str
) -> None:
    attention = _attention(_SHAPES[shape], tensor_core_decode=False)
    batch = attention_batch([[9], [40]], random_tables(2), num_decodes=2)
    q, k_cache, v_cache = _inputs(_SHAPES[shape], 2, torch.float16)
    attention.run(prepared(attention, batch), q, k_cache, v_cache, None)
    # Only the prefill module's planner is told the lengths.
    assert (stand_in.plans[0].kv_lens is not None) == (shape == "gqa 7")


@pytest.mark.parametrize("stock_module", [False, True], ids=["variant", "stock"])
def test_deterministic_attention_never_splits_keys(stand_in: StandIn, stock_module: bool) -> None:
    rows, num_decodes, num_dense = _BATCHES["all kinds at once"]
    batch = attention_batch(rows, random_tables(len(rows)), num_decodes, num_dense)
    q, k_cache, v_cache = _inputs((9, 3, 64), len(batch.row_positions), torch.float16)
    splits = []
    for deterministic in (True, False):
        attention = _attention(deterministic=deterministic, stock_module=stock_module)
        attention.run(prepared(attention, batch), q, k_cache, v_cache, None)
        splits.append([plan.splits for plan in stand_in.plans[-3:]])
    assert splits == [[False] * 3, [True] * 3]


def _batch_of(step: int, *, scattered: bool = True) -> AttentionBatch:
    """All three kinds; another one for every step."""
    rows = [[30 + step], list(range(40 + step))]
    if scattered:
        rows.append([1, 5 + step, 77 + step])
    return attention_batch(rows, random_tables(len(rows)), num_decodes=1, num_dense=1)


def _run_steps(attention: FlashInferAttention, num_steps: int) -> None:
    for step in range(num_steps):
        batch = _batch_of(step)
        q, k_cache, v_cache = _inputs((9, 3, 64), len(batch.row_positions), torch.float16)
        attention.run(prepared(attention, batch), q, k_cache, v_cache, None)


def test_plans_made_ahead_occupy_no_wrapper(stand_in: StandIn) -> None:
    attention = _attention()
    batches = [_batch_of(step) for step in range(8)]
    plans = [prepared(attention, batch) for batch in batches]
    assert not stand_in.plans
    for batch, plan in zip(batches, plans, strict=True):
        q, k_cache, v_cache = _inputs((9, 3, 64), len(batch.row_positions), torch.float16)
        outs = [attention.run(plan, q, k_cache, v_cache, None) for _ in range(3)]
        assert torch.equal(outs[0], outs[2])
    assert len(stand_in.plans) == 8 * 3


def test_a_plan_that_is_run_again_behind_many_others_is_planned_again(stand_in: StandIn) -> None:
    attention = _attention()
    plans = [prepared(attention, _batch_of(step)) for step in range(5)]
    sizes = [len(_batch_of(step).row_positions) for step in range(5)]
    inputs = [_inputs((9, 3, 64), size, torch.float16) for size in sizes]
    first = attention.run(plans[0], *inputs[0], None)
    for plan, tensors in zip(plans, inputs, strict=True):
        attention.run(plan, *tensors, None)
    num_plans = len(stand_in.plans)
    assert torch.equal(attention.run(plans[0], *inputs[0], None), first)
    assert len(stand_in.plans) == num_plans + 3


def test_row_sets_of_a_step_share_the_plans_that_are_equal(stand_in: StandIn) -> None:
    attention = _attention()
    for scattered in (True, False, True):
        batch = _batch_of(0, scattered=scattered)
        q, k_cache, v_cache = _inputs((9, 3, 64), len(batch.row_positions), torch.float16)
        attention.run(prepared(attention, batch), q, k_cache, v_cache, None)
    # Decodes and dense rows are the same in all three.
    assert len(stand_in.plans) == 3


def test_a_wrapper_is_never_planned_while_the_copy_of_its_plan_is_pending() -> None:
    with flashinfer_stand_in(slow_copies=True) as stand_in:
        attention = _attention(new_event=stand_in.new_event)
        _run_steps(attention, 3)
        assert stand_in.num_waits == 0  # several wrappers of a role take turns
        _run_steps(attention, 8)
        assert len(stand_in.plans) == 8 * 3
        assert stand_in.num_waits == 5 * 3


def test_without_events_the_stand_in_catches_the_second_plan() -> None:
    with flashinfer_stand_in(slow_copies=True):
        attention = _attention()
        _run_steps(attention, 3)
        with pytest.raises(ContractError, match="whose copy is pending"):
            _run_steps(attention, 4)


def _fill(attention: FlashInferAttention, plan: object, batch: AttentionBatch) -> None:
    layout = attention.layout(batch)
    tensors = [torch.from_numpy(array) for array in layout.arrays]
    attention.fill(plan, layout, tensors)  # type: ignore[arg-type]


@pytest.mark.parametrize("tensor_core_decode", [False, True], ids=["cuda cores", "tensor cores"])
@pytest.mark.parametrize("dtype", list(_ROUNDING), ids=str)
@pytest.mark.usefixtures("stand_in")
def test_a_graphs_plan_serves_any_decodes_up_to_its_size(
    dtype: torch.dtype, tensor_core_decode: bool
) -> None:
    attention = _attention(dtype=dtype, tensor_core_decode=tensor_core_decode)
    plan = attention.graph_plan(num_rows=4, max_blocks=13, scratch_block=39)
    q, k_cache, v_cache = _inputs((9, 3, 64), 4, dtype)
    for rows in ([[37], [80], [20]], [[207]], [[0], [15], [16], [207]], [[5], [199]]):
        tables = random_tables(len(rows))
        counts = [True, False, True, True][: len(rows)]
        batch = attention_batch(rows, tables, num_decodes=len(rows), counts=counts)
        received, expected = torch.zeros(2, len(k_cache))
        _fill(attention, plan, batch)
        out = attention.run(plan, q, k_cache, v_cache, received)
        direct = attention.run(
            prepared(attention, batch), q[: len(rows)], k_cache, v_cache, expected
        )
        assert torch.equal(out[: len(rows)], direct)
        # Padding sees one key, and counts no influence: the scratch block is nobody's.
        scratch = v_cache[39 * BLOCK].repeat_interleave(3, dim=0)
        assert all(torch.equal(row, scratch) for row in out[len(rows) :])
        assert torch.equal(received, expected)


@pytest.mark.usefixtures("stand_in")
def test_a_graphs_plan_can_be_captured_before_it_is_filled() -> None:
    attention = _attention()
    plan = attention.graph_plan(num_rows=3, max_blocks=2, scratch_block=7)
    q, k_cache, v_cache = _inputs((9, 3, 64), 3, torch.float16)
    received = torch.zeros(len(k_cache))
    out = attention.run(plan, q, k_cache, v_cache, received)
    assert torch.equal(out, v_cache[7 * BLOCK].repeat_interleave(3, dim=0).expand(3, 9, 64))
    assert not received.any()


@pytest.mark.usefixtures("stand_in")
def test_graphs_of_several_sizes_take_turns() -> None:
    attention = _attention()
    large, small = (attention.graph_plan(size, 13, scratch_block=39) for size in (4, 2))
    assert attention.graph_plan(4, 13, scratch_block=39) is large
    q, k_cache, v_cache = _inputs((9, 3, 64), 4, torch.float16)
    for plan, size, rows in (
        (large, 4, [[37], [80], [20]]),
        (small, 2, [[9], [100]]),
        (large, 4, [[3], [4], [5], [207]]),
    ):
        tables = random_tables(len(rows))
        _fill(attention, plan, attention_batch(rows, tables, num_decodes=len(rows)))
        out = attention.run(plan, q[:size], k_cache, v_cache, None)[: len(rows)]
        expected = batch_attention(q[: len(rows)], k_cache, v_cache, rows, tables)
        assert (out - expected).abs().max() < _ROUNDING[torch.float16]


def test_filling_again_waits_until_the_plan_before_is_copied() -> None:
    with flashinfer_stand_in(slow_copies=True) as stand_in:
        attention = _attention(new_event=stand_in.new_event)
        plan = attention.graph_plan(num_rows=2, max_blocks=13, scratch_block=39)
        for step in range(3):
            _fill(attention, plan, attention_batch([[step]], random_tables(1), num_decodes=1))
        assert stand_in.num_waits == 3


@pytest.mark.usefixtures("stand_in")
def test_only_decodes_that_fit_can_be_replayed() -> None:
    attention = _attention()
    plan = attention.graph_plan(num_rows=2, max_blocks=13, scratch_block=39)
    with pytest.raises(ValueError, match="3 rows in a graph of 2"):
        _fill(attention, plan, attention_batch([[1], [2], [3]], random_tables(3), num_decodes=3))
    for num_dense in (0, 1):
        batch = attention_batch([[1], [2, 3]], random_tables(2), 1, num_dense)
        with pytest.raises(ValueError, match="only decodes"):
            _fill(attention, plan, batch)


def test_single_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="FlashInfer needs bfloat16 or float16"):
        _attention(dtype=torch.float32)


def test_a_missing_flashinfer_is_told_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", None)
    with pytest.raises(ModuleNotFoundError, match=r"install relaykv\[cuda\]"):
        _attention()
