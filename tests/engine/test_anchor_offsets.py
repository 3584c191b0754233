from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from sync_recorder import SyncRecorder
from tiny_core import tiny_model
from torch import Tensor

from relaykv.engine.anchor_offsets import add_anchors, anchor_distances, store_anchors
from relaykv.engine.batch import AnchorPlace, AnchorQuery, AnchorRecord, RelayCopy
from relaykv.engine.config import CacheConfig
from relaykv.engine.kv_cache import KVCache
from relaykv.kernels.kernel_set import torch_kernels
from relaykv.kernels.rope import cos_sin, rotate_keys
from relaykv.kernels.staging import Staging

NUM_BLOCKS = 40
STAGING = Staging(torch.device("cpu"), packed=True)
KERNELS = torch_kernels()
INV_FREQ = tiny_model().inv_freq
FREQUENCIES = INV_FREQ.numpy()


@pytest.fixture
def cache() -> KVCache:
    made = KVCache(tiny_model().config, CacheConfig(NUM_BLOCKS), torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    made.k.copy_(torch.randn(made.k.shape, generator=generator))
    made.v.copy_(torch.randn(made.v.shape, generator=generator))
    return made


def place(base: Sequence[int], start: int, offsets: Sequence[int]) -> AnchorPlace:
    return AnchorPlace(tuple(base), start, tuple(offsets))


# Two segments, of 20 tokens with two anchors and of 5 with one.
LONG = (place((3, 9), 7, (12, 11)), place((5, 1, 2), 15, (13, 14)))
SHORT = (place((6,), 4, (15,)),)


def turned(k: Tensor, position: int) -> Tensor:
    cos, sin = cos_sin(INV_FREQ, torch.tensor([position]))
    return rotate_keys(k, cos[0], sin[0])


def values(cache: KVCache, block_ids: Sequence[int], start: int, count: int) -> Tensor:
    return cache.v[:, cache.slots(block_ids, start, start + count)]


def keys(cache: KVCache, block_ids: Sequence[int], start: int, count: int) -> Tensor:
    return cache.k[:, cache.slots(block_ids, start, start + count)]


def test_distances_are_norms_over_all_there_is_of_a_segment(cache: KVCache) -> None:
    queries = [AnchorQuery((20, 21), 3, 20, LONG), AnchorQuery((22,), 9, 5, SHORT)]
    found = anchor_distances(cache, queries, STAGING, KERNELS)
    assert [len(row) for row in found] == [2, 1]
    for query, row in zip(queries, found, strict=True):
        own = values(cache, query.source_block_ids, query.source_start, query.num_tokens)
        for anchor, distance in zip(query.anchors, row, strict=True):
            base = values(cache, anchor.base_block_ids, anchor.base_start, query.num_tokens)
            assert distance == pytest.approx(float((own - base).norm()), rel=1e-5)


def test_an_offset_is_stored_in_the_frame_of_a_segment_at_position_0(cache: KVCache) -> None:
    copy = RelayCopy((20, 21), 3, (22, 23, 24), 25, 20)
    old_k, old_v = keys(cache, (20, 21), 3, 20), values(cache, (20, 21), 3, 20)
    new_k, new_v = keys(cache, (22, 23, 24), 25, 20), values(cache, (22, 23, 24), 25, 20)
    store_anchors(cache, [AnchorRecord(copy, LONG[0])], FREQUENCIES, STAGING)
    expected = turned(new_k, -25) - turned(old_k, -3)
    torch.testing.assert_close(keys(cache, (12, 11), 0, 20), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(values(cache, (12, 11), 0, 20), new_v - old_v, rtol=0, atol=1e-6)


def test_segments_with_different_numbers_of_anchors_are_corrected_together(
    cache: KVCache,
) -> None:
    copies = [
        RelayCopy((), 0, (30, 31), 4, 20, anchors=LONG),
        RelayCopy((), 0, (32, 33), 17, 5, anchors=SHORT),
    ]
    expected = []
    for copy in copies:
        own_k = keys(cache, copy.block_ids, copy.start, copy.num_tokens)
        own_v = values(cache, copy.block_ids, copy.start, copy.num_tokens)
        bases = [
            values(cache, a.base_block_ids, a.base_start, copy.num_tokens) for a in copy.anchors
        ]
        roots = torch.stack([(own_v - b).square().sum(dim=(0, 2, 3)).sqrt() for b in bases])
        weights = (-roots / roots.amin(dim=0)).softmax(dim=0)
        lack_k, lack_v = torch.zeros_like(own_k), torch.zeros_like(own_v)
        for anchor, weight in zip(copy.anchors, weights, strict=True):
            ids = anchor.offset_block_ids
            lack_k += weight[:, None, None] * keys(cache, ids, 0, copy.num_tokens)
            lack_v += weight[:, None, None] * values(cache, ids, 0, copy.num_tokens)
        expected.append((own_k + turned(lack_k, copy.start), own_v + lack_v))
    add_anchors(cache, copies, FREQUENCIES, STAGING, KERNELS)
    for copy, (k, v) in zip(copies, expected, strict=True):
        found_k = keys(cache, copy.block_ids, copy.start, copy.num_tokens)
        found_v = values(cache, copy.block_ids, copy.start, copy.num_tokens)
        torch.testing.assert_close(found_k, k, rtol=0, atol=2e-6)
        torch.testing.assert_close(found_v, v, rtol=0, atol=2e-6)


def test_nothing_but_the_segments_is_changed(cache: KVCache) -> None:
    before_k, before_v = cache.k.clone(), cache.v.clone()
    copy = RelayCopy((), 0, (30, 31), 4, 20, anchors=LONG)
    add_anchors(cache, [copy], FREQUENCIES, STAGING, KERNELS)
    others = torch.ones(cache.k.shape[1], dtype=torch.bool)
    others[cache.slots((30, 31), 4, 24)] = False
    assert torch.equal(cache.k[:, others], before_k[:, others])
    assert torch.equal(cache.v[:, others], before_v[:, others])
    assert not torch.equal(cache.v, before_v)


def test_adding_and_storing_do_not_wait_for_the_device(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = SyncRecorder()
    monkeypatch.setattr(Staging, "upload", recorder.expecting(Staging.upload))
    copy = RelayCopy((20, 21), 3, (30, 31), 4, 20, anchors=LONG)
    with recorder:
        add_anchors(cache, [copy], FREQUENCIES, STAGING, KERNELS)
        store_anchors(cache, [AnchorRecord(copy, LONG[0])], FREQUENCIES, STAGING)
    assert recorder.num_expected == 2
    assert recorder.calls == []
