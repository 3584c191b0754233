"""Gates that relayed KV has to pass before any claim of quality: exact where it must be exact."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from dense_forward import dense_logits
from relay_bench import RelayBench
from tiny_models import save_tiny_model
from torch import Tensor

from relaykv.engine.loader import load_model
from relaykv.engine.policy import Bands, Deviation, Policy, Selection
from relaykv.engine.segment import Segment

_EVERYTHING = Selection(deviation=Deviation.COSINE, deviation_share=1.0)


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> RelayBench:
    save_tiny_model(tmp_path, request.param, tied=True)
    model = load_model(tmp_path, torch.float32, torch.device("cpu"))
    return RelayBench(model, hidden_layer=1)


def _ids(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 90, (count,), generator=generator).tolist()


def _dense(bench: RelayBench, tokens: Sequence[int]) -> Tensor:
    return dense_logits(bench.model, list(tokens))


def test_keys_relayed_to_their_old_position_are_the_same(bench: RelayBench) -> None:
    tokens = _ids(1, 50)
    source = bench.record(tokens)
    away = bench.relay_only(source, Segment(137, 177, 0, 5))
    back = bench.copy_of(away, start=137, shift=-132, num_tokens=40)
    assert torch.allclose(back.k, bench.kv(source, 5, 45).k, atol=1e-5)
    assert torch.equal(back.v, bench.kv(source, 5, 45).v)


def test_relayed_keys_equal_keys_computed_at_the_new_position_where_context_does_not_matter(
    bench: RelayBench,
) -> None:
    # Layer 0 sees only the token itself, so the shifted key must be the fresh one.
    segment = _ids(2, 40)
    source = bench.record(_ids(3, 7) + segment)
    moved = bench.kv(bench.relay_only(source, Segment(90, 130, 0, 7)), 90, 130)
    fresh = bench.record(_ids(4, 90) + segment)
    expected = bench.kv(fresh, 90, 130)
    assert torch.allclose(moved.k[0], expected.k[0], atol=1e-5)
    assert torch.allclose(moved.v[0], expected.v[0], atol=1e-6)


@pytest.mark.parametrize(
    "policy",
    [
        Policy("shift", relays=True),
        Policy("epic", True, Bands(0, 0, 2), Selection(num_first=16)),
        Policy(
            "relay",
            True,
            Bands(1, 2, 2),
            Selection(num_last=10, deviation=Deviation.COSINE, deviation_factor=1.5),
        ),
    ],
    ids=lambda policy: policy.name,
)
def test_behind_the_producers_own_prefix_every_policy_gives_the_full_prefill(
    bench: RelayBench, policy: Policy
) -> None:
    prefix, segment, tail = _ids(5, 21), _ids(6, 45), _ids(7, 9)
    source = bench.record(prefix + segment)
    tokens = prefix + segment + tail
    logits, _ = bench.prefill(tokens, [(source, Segment(21, 66, 0, 21))], policy)
    assert torch.allclose(logits, _dense(bench, tokens)[-9:], atol=1e-4)


def test_behind_the_producers_own_prefix_deviation_selects_nothing(bench: RelayBench) -> None:
    prefix, segment, tail = _ids(5, 21), _ids(6, 45), _ids(7, 9)
    source = bench.record(prefix + segment)
    selection = Selection(deviation=Deviation.COSINE, deviation_factor=1.5, deviation_floor=1e-3)
    policy = Policy("relay", True, Bands(1, 2, 2), selection)
    spans = [(source, Segment(21, 66, 0, 21))]
    _, counts = bench.prefill(prefix + segment + tail, spans, policy)
    assert dict(counts.offsets) == {21: ()}


def test_recomputing_everything_from_the_embeddings_is_a_full_prefill(bench: RelayBench) -> None:
    segment, tail = _ids(8, 60), _ids(9, 11)
    source = bench.record(_ids(10, 17) + segment)
    tokens = _ids(11, 35) + segment + tail
    spans = [(source, Segment(35, 95, 0, 17))]
    for bands in (Bands(0, 0, 2), Bands(0, 1, 2), Bands(0, 2, 2)):
        policy = Policy("everything", True, bands, _EVERYTHING)
        logits, counts = bench.prefill(tokens, spans, policy)
        assert torch.allclose(logits, _dense(bench, tokens)[-11:], atol=1e-4)
        assert counts.num_layer_tokens == 3 * 60
    shift, _ = bench.prefill(tokens, spans, Policy("shift", relays=True))
    assert not torch.allclose(shift, _dense(bench, tokens)[-11:], atol=1e-2)


def test_kv_computed_from_the_stored_hidden_state_equals_the_stored_kv(bench: RelayBench) -> None:
    tokens = _ids(12, 40)
    source = bench.record(tokens)
    hidden = bench.hidden(source, 0, 40)
    cos, sin = bench.model.rope(torch.arange(40))
    _, k, v = bench.model.project_qkv(1, hidden, cos, sin)
    stored = bench.kv(source, 0, 40)
    assert torch.allclose(k, stored.k[1], atol=1e-6)
    assert torch.allclose(v, stored.v[1], atol=1e-6)


def test_injecting_at_the_stored_layer_starts_from_the_relayed_hidden_states(
    bench: RelayBench,
) -> None:
    # Everything from the injection layer on is recomputed; only the layer below is relayed.
    # With the producer's own prefix there is no error below it either.
    prefix, segment, tail = _ids(13, 20), _ids(14, 40), _ids(15, 8)
    source = bench.record(prefix + segment)
    policy = Policy("inject", True, Bands(1, 2, 2), _EVERYTHING)
    tokens = prefix + segment + tail
    logits, counts = bench.prefill(tokens, [(source, Segment(20, 60, 0, 20))], policy)
    assert torch.allclose(logits, _dense(bench, tokens)[-8:], atol=1e-4)
    assert counts.num_layer_tokens == 2 * 40


def test_two_segments_that_do_not_touch_are_each_put_in_their_place(bench: RelayBench) -> None:
    one, two = _ids(16, 37), _ids(17, 41)
    first = bench.record(_ids(18, 12) + one)
    second = bench.record(_ids(19, 33) + two)
    # In the other order than they were made, with text before, between and behind.
    tokens = _ids(20, 19) + two + _ids(21, 6) + one + _ids(22, 13)
    spans = [(second, Segment(19, 60, 0, 33)), (first, Segment(66, 103, 0, 12))]
    everything = Policy("everything", True, Bands(0, 1, 2), _EVERYTHING)
    logits, counts = bench.prefill(tokens, spans, everything)
    assert torch.allclose(logits, _dense(bench, tokens)[-13:], atol=1e-4)
    assert dict(counts.offsets) == {19: tuple(range(41)), 66: tuple(range(37))}


def test_a_selected_row_sees_the_keys_before_it_and_none_behind_it(bench: RelayBench) -> None:
    # The naive "last n positions" mask would let early selected rows see later keys. With only
    # some rows of two segments active, every one of them must match a dense run in which all
    # keys are what this cache holds: here all KV is exact, so the full prefill itself.
    prefix, one, gap, two = _ids(23, 18), _ids(24, 35), _ids(25, 5), _ids(26, 38)
    tokens = prefix + one + gap + two + _ids(27, 7)
    source = bench.record(prefix + one + gap + two)
    spans = [(source, Segment(18, 53, 0, 18)), (source, Segment(58, 96, 0, 58))]
    policy = Policy("some", True, Bands(0, 0, 2), Selection(num_first=5, num_last=3))
    logits, counts = bench.prefill(tokens, spans, policy)
    assert torch.allclose(logits, _dense(bench, tokens)[-7:], atol=1e-4)
    assert dict(counts.offsets) == {
        18: (0, 1, 2, 3, 4, 32, 33, 34),
        58: (0, 1, 2, 3, 4, 35, 36, 37),
    }
    # And what the selected rows wrote is what was there.
    assert torch.allclose(bench.last_kv(0, 96).k, bench.kv(source, 0, 96).k, atol=1e-4)


def test_chunks_give_what_one_step_gives(bench: RelayBench) -> None:
    one, two = _ids(28, 40), _ids(29, 50)
    first = bench.record(_ids(30, 9) + one)
    second = bench.record(_ids(31, 14) + two)
    tokens = _ids(32, 23) + one + _ids(33, 4) + two + _ids(34, 10)
    spans = [(first, Segment(23, 63, 0, 9)), (second, Segment(67, 117, 0, 14))]
    policy = Policy(
        "relay",
        True,
        Bands(1, 2, 2),
        Selection(num_last=10, deviation=Deviation.COSINE, deviation_factor=1.1),
    )
    whole, counts = bench.prefill(tokens, spans, policy)
    parts, chunk_counts = bench.prefill(tokens, spans, policy, chunks=(10, 63, 64, 119))
    assert torch.allclose(parts, whole[-len(parts) :], atol=1e-4)
    assert dict(chunk_counts.offsets) == dict(counts.offsets)


@pytest.mark.parametrize("chunks", [(), (10, 60, 85)], ids=["whole", "in chunks"])
@pytest.mark.parametrize(
    ("bands", "selection"),
    [
        (Bands(0, 0, 2), Selection(num_first=9, num_last=2)),
        (Bands(0, 1, 2), Selection(deviation=Deviation.SQUARED, deviation_share=0.3)),
        (Bands(1, 2, 2), Selection(deviation=Deviation.COSINE, deviation_factor=1.2)),
    ],
    ids=["before the forward", "by share", "by factor"],
)
def test_the_tokens_said_to_be_recomputed_are_those_whose_kv_is_no_longer_the_relayed_one(
    bench: RelayBench, bands: Bands, selection: Selection, chunks: tuple[int, ...]
) -> None:
    segment = _ids(36, 70)
    source = bench.record(_ids(37, 12) + segment)
    tokens = _ids(38, 23) + segment + _ids(39, 8)
    spans = [(source, Segment(23, 93, 0, 12))]
    _, counts = bench.prefill(tokens, spans, Policy("p", True, bands, selection), chunks)
    relayed, now = bench.copy_of(source, 12, 11, 70), bench.last_kv(23, 93)
    differs = (now.v[2] != relayed.v[2]).flatten(1).any(1)
    said = [start + offset for start, offsets in counts.offsets.items() for offset in offsets]
    assert 0 < len(said) < 70
    assert said == [23 + offset for offset in differs.nonzero().flatten().tolist()]
    assert list(counts.offsets) == ([23, 60, 85] if chunks else [23])


def test_relayed_hidden_states_and_influence_travel_with_the_kv(bench: RelayBench) -> None:
    source = bench.record(_ids(35, 48))
    bench.cache.influence.copy_(torch.arange(bench.cache.influence.numel()))
    moved = bench.relay_only(source, Segment(70, 102, 0, 16))
    assert torch.equal(bench.hidden(moved, 70, 102), bench.hidden(source, 16, 48))
    assert torch.equal(bench.influence(moved, 70, 102), bench.influence(source, 16, 48))
