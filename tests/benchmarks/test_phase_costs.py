"""Costs of phases against values worked out by hand on a model of round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model_shapes import llama_8b, qwen3_06b
from paper_setups import Piece
from phase_costs import (
    Accelerator,
    Cost,
    decode,
    floor_s,
    kv_bytes,
    num_parameters,
    num_selected,
    prefill,
    shift_copy,
    total,
)

from relaykv.engine.config import ModelConfig
from relaykv.engine.policy import Bands, builtin_policies
from relaykv.engine.prefill_plan import SpanKind

# 4 layers, d 10, 2 query heads and 1 key head of 5, feed-forward 20, vocabulary 100: a layer has
# 10 * (2 + 2) * 5 = 200 parameters in q, k, v and 2 * 5 * 10 + 3 * 10 * 20 = 700 in the rest.
CONFIG = replace(
    llama_8b().config,
    num_layers=4,
    hidden_size=10,
    num_heads=2,
    num_kv_heads=1,
    head_dim=5,
    intermediate_size=20,
    vocab_size=100,
    rope=replace(llama_8b().config.rope, rotary_dim=4),
)
POLICIES = builtin_policies(4, Bands(1, 2, 2))
QKV, REST = 200, 700
KV = 2 * 1 * 5 * 2  # bytes of a token and layer
LOGITS = Cost(2 * 100 * 10, 2 * 100 * 10)


def compute(num_tokens: int) -> Piece:
    return Piece(SpanKind.COMPUTE, num_tokens)


def prefix(num_tokens: int) -> Piece:
    return Piece(SpanKind.PREFIX, num_tokens)


def relay(num_tokens: int) -> Piece:
    return Piece(SpanKind.RELAY, num_tokens)


def layer(projected: int, finished: int, scores: float, keys: int) -> Cost:
    operations = 2 * (projected * QKV + finished * REST) + 4 * (2 * 5) * scores
    return Cost(operations, 2 * (QKV + REST) + KV * (keys + projected))


@pytest.mark.parametrize(
    ("config", "billions", "kib"),
    [(llama_8b().config, 8.03, 128), (qwen3_06b().config, 0.596, 112)],
)
def test_the_public_shapes_have_their_public_sizes(
    config: ModelConfig, billions: float, kib: int
) -> None:
    assert num_parameters(config) / 1e9 == pytest.approx(billions, rel=1e-3)
    assert kv_bytes(config) == kib * 1024


def test_a_dense_prefill_counts_every_row_at_every_layer() -> None:
    # Rows at positions 0..3 see 1 + 2 + 3 + 4 = 10 keys.
    expected = [layer(4, 4, 10, 4)] * 4
    assert prefill(CONFIG, [compute(4)], POLICIES["full"]) == [*expected, LOGITS]


def test_rows_behind_a_prefix_read_its_keys_and_compute_none_of_them() -> None:
    # Rows at positions 10 and 11 see 11 + 12 keys.
    costs = prefill(CONFIG, [prefix(10), compute(2)], POLICIES["full"])
    assert costs[:4] == [layer(2, 2, 23, 12)] * 4


def test_a_relay_without_repair_is_a_copy_and_the_rows_around_it() -> None:
    costs = prefill(CONFIG, [relay(10), compute(1)], POLICIES["shift"])
    assert costs[0] == shift_copy(CONFIG, 10)
    assert costs[1:5] == [layer(1, 1, 11, 11)] * 4


def test_a_shift_copy_reads_and_writes_every_tensor_and_rotates_keys() -> None:
    # KV of 4 layers, the hidden state and an fp32 influence; 4 rotated values a layer and head.
    assert shift_copy(CONFIG, 3) == Cost(3 * 3 * 4 * 4, 2 * 3 * (4 * KV + 10 * 2 + 4))


def test_bands_decide_which_relayed_rows_run_at_a_layer() -> None:
    # relay: inject 1, select 2, stop 2; its expected share of 20 tokens is 4.
    costs = prefill(CONFIG, [relay(20), compute(1)], POLICIES["relay"])[1:5]
    mean_keys = (1 + 20) / 2
    assert costs == [
        layer(1, 1, 21, 21),  # below `inject`
        layer(21, 21, 20 * mean_keys + 21, 21),  # all of them
        layer(21, 5, 4 * mean_keys + 21, 21),  # projected, then selected
        layer(1, 1, 21, 21),  # above `stop`
    ]


def test_epic_runs_the_first_tokens_through_all_layers() -> None:
    costs = prefill(CONFIG, [prefix(2), relay(20), compute(1)], POLICIES["epic"])[1:5]
    keys_of_the_first = 16 * (3 + 18) / 2  # positions 2..17
    assert costs == [layer(17, 17, keys_of_the_first + 23, 23)] * 4


def test_the_number_of_selected_tokens_is_the_policys() -> None:
    assert [num_selected(POLICIES[name], 100) for name in ("epic", "cacheblend", "relay")] == [
        16, 15, 20
    ]  # fmt: skip
    assert num_selected(POLICIES["epic"], 5) == 5


def test_a_decode_step_reads_all_weights_once_and_each_context() -> None:
    costs = decode(CONFIG, batch=3, context=9)
    assert costs[:4] == [layer(3, 3, 30, 30)] * 4
    assert costs[4] == Cost(3 * LOGITS.operations, LOGITS.num_bytes)


def test_a_floor_is_the_larger_of_arithmetic_and_memory_stage_by_stage() -> None:
    machine = Accelerator("round", operations_per_s=100.0, bytes_per_s=10.0)
    stages = [Cost(1000.0, 10.0), Cost(10.0, 20.0)]
    assert floor_s(stages, machine) == 10.0 + 2.0
    assert floor_s(stages, machine, min_stage_s=3.0) == 10.0 + 3.0
    assert total(stages) == Cost(1010.0, 30.0)


def test_llamas_decode_is_bound_by_its_weights() -> None:
    # 7.5 G parameters are read (the embedding is not), in bfloat16, at 4.8 TB/s.
    h200 = Accelerator("H200", 989e12, 4.8e12)
    seconds = floor_s(decode(llama_8b().config, 1, 0), h200)
    assert seconds == pytest.approx(2 * 7.505e9 / 4.8e12, rel=2e-3)
