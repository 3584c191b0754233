"""KVCOMM's hand-offs through a whole engine: the first are computed, later ones corrected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from test_learned_policy import kept, policies, turned
from tiny_core import Result, ids, request, run, tiny_parts

from relaykv.engine.assembly import build_core
from relaykv.engine.core import EngineCore

NUM_TEXT_TOKENS = 60
GLUE = ids(3, 16)


def kvcomm_core(**relay: float) -> EngineCore:
    """Two anchors do, as in the authors' code."""
    parts = tiny_parts(max_num_batched_tokens=512)
    changed = replace(parts.relay, **{"min_anchors": 2, **relay})  # type: ignore[arg-type]
    return build_core(replace(parts, relay=changed))


def read(
    core: EngineCore, number: int, text: int, num_task_tokens: int = 5, max_tokens: int = 3
) -> Result:
    """Text `text` of a writer in the prompt of a reader whose task differs from time to time."""
    session = f"session {number}"
    user = [*ids(1, 40), *ids(1000 + text, 9)]
    written = run(core, request(f"w{number}", user, NUM_TEXT_TOKENS, session))[0]
    prompt = [*ids(2, 40), *ids(100 + number, num_task_tokens), *GLUE, *written.token_ids]
    reader = request(f"r{number}", [*prompt, *ids(4, 7)], max_tokens, session, "kvcomm")
    return run(core, reader)[0]


def segment_kv(core: EngineCore, number: int, result: Result) -> Sequence[torch.Tensor]:
    """Keys, turned to a segment at position 0, and values of what a reader was handed."""
    segment = result.relay.segments[0]
    k, v = kept(core, f"r{number}", segment.start, segment.stop - segment.start)
    return turned(k, -segment.start), v


def test_the_first_two_texts_are_computed_and_become_anchors() -> None:
    core = kvcomm_core()
    for number in range(2):
        result = read(core, number, text=number)
        assert policies(result) == ["full"]
        assert result.relay.reason == f"anchors of this kind of hand-off: {number}; 2 are needed"
        assert core.stats().num_anchors == number + 1
    assert core.stats().num_anchor_bytes > 0
    assert core.pool.counts().used == 0


def test_five_anchors_are_needed_unless_it_is_said_otherwise() -> None:
    core = build_core(tiny_parts(max_num_batched_tokens=256))
    results = [read(core, number, text=number) for number in range(6)]
    assert [policies(result) for result in results[:5]] == [["full"]] * 5
    assert "kind of hand-off: 4; 5 are needed" in str(results[4].relay.reason)
    assert "anchors; the entropy" in str(results[5].relay.segments[0].why) or (
        "none of 5 anchors stands out" in str(results[5].relay.reason)
    )


def test_a_text_that_is_handed_on_again_elsewhere_is_as_if_computed_in_the_anchors_place() -> None:
    core = kvcomm_core()
    first = read(core, 0, text=7, num_task_tokens=5)
    read(core, 1, text=8)
    again = read(core, 2, text=7, num_task_tokens=60)
    assert policies(again) == ["kvcomm"]
    assert again.relay.segments[0].why == "corrected by the anchor of this very text"
    assert again.relay.segments[0].start == first.relay.segments[0].start + 55
    assert again.relay.num_relayed_tokens == NUM_TEXT_TOKENS - 1
    for found, expected in zip(segment_kv(core, 2, again), segment_kv(core, 0, first), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_an_unlike_text_is_refused_and_becomes_an_anchor() -> None:
    """Under a tight bound: the published one passes texts by a hair's breadth."""
    core = kvcomm_core(anchor_entropy=0.01)
    for number in range(4):
        result = read(core, number, text=number)
        assert policies(result) == ["full"]
    assert "none of 3 anchors stands out" in str(result.relay.reason)
    assert core.stats().num_anchors == 4


def test_a_text_is_corrected_by_a_weighted_sum_of_its_anchors_offsets() -> None:
    core = kvcomm_core(anchor_entropy=1.0)  # whatever their distances
    results = [read(core, number, text=number, num_task_tokens=4 + number) for number in range(3)]
    assert [policies(result) for result in results] == [["full"], ["full"], ["kvcomm"]]
    size = NUM_TEXT_TOKENS - 1

    def base(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = kept(core, f"w{number}", 49, size)
        return turned(k, -49), v

    own_k, own_v = base(2)
    roots, lacks = [], []
    for number in range(2):
        k, v = base(number)
        roots.append((own_v - v).square().sum(dim=(0, 2, 3)).sqrt())
        new_k, new_v = segment_kv(core, number, results[number])
        lacks.append((new_k - k, new_v - v))
    distances = torch.stack(roots)  # [anchors, tokens]
    weights = (-distances / distances.amin(0)).softmax(0)[:, :, None, None]
    found_k, found_v = segment_kv(core, 2, results[2])
    expected_k = own_k + sum(w * lack[0] for w, lack in zip(weights, lacks, strict=True))
    expected_v = own_v + sum(w * lack[1] for w, lack in zip(weights, lacks, strict=True))
    torch.testing.assert_close(found_k, expected_k, rtol=0, atol=2e-5)
    torch.testing.assert_close(found_v, expected_v, rtol=0, atol=2e-5)


def test_a_text_longer_than_its_anchors_is_computed() -> None:
    core = kvcomm_core()
    session = "long"
    for number in range(2):
        read(core, number, text=number)
    written = run(core, request("w", [*ids(1, 40), *ids(5, 9)], NUM_TEXT_TOKENS + 5, session))[0]
    prompt = [*ids(2, 40), *ids(6, 3), *GLUE, *written.token_ids, *ids(4, 7)]
    result = run(core, request("r", prompt, 2, session, "kvcomm"))[0]
    assert policies(result) == ["full"]
    assert "of hand-off: 2, as long as this text: 0" in str(result.relay.reason)
    assert core.stats().num_anchors == 3


def test_segments_of_one_prompt_are_decided_on_one_by_one() -> None:
    core = kvcomm_core()
    texts = {}
    for name, text in (("known", 1), ("new", 2)):
        user = [*ids(1, 40), *ids(1000 + text, 9)]
        texts[name] = run(core, request(name, user, NUM_TEXT_TOKENS, "s"))[0].token_ids
    before = [*ids(2, 40), *ids(9, 3), *GLUE, *texts["known"], *ids(4, 7)]
    run(core, request("first", before, 1, "s", "kvcomm", store=False))
    prompt = [*ids(2, 40), *ids(11, 6), *GLUE, *texts["known"], *ids(12, 17), *texts["new"], 5]
    result = run(core, request("second", prompt, 1, "s", "kvcomm"))[0]
    assert policies(result) == ["kvcomm", "full"]
    assert core.stats().num_anchors == 2  # the second one behind a segment that was relayed


def test_without_a_share_of_the_cache_everything_is_computed() -> None:
    core = kvcomm_core(anchor_share=0.0)
    for number in range(3):
        result = read(core, number, text=0)
        assert policies(result) == ["full"]
        assert result.relay.reason == "this engine keeps no anchors"
    assert core.stats().num_anchors == 0
    assert core.pool.counts().used == 0


def test_when_its_share_is_used_up_there_are_no_new_anchors() -> None:
    core = kvcomm_core(anchor_share=10 / 256)
    for number in range(3):
        read(core, number, text=number)
    stats = core.stats()
    assert stats.num_anchors == 1
    assert stats.num_refused_anchors == 2
    assert stats.num_anchor_bytes <= 10 * core._bytes_per_block
    assert policies(read(core, 3, text=0)) == ["kvcomm"]


def test_a_failure_to_store_an_anchor_costs_the_anchor_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = kvcomm_core()

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "store_anchors", fail)
        assert len(read(core, 0, text=0).token_ids) == 3
    assert "observations of hand-offs failed and are dropped" in caplog.text
    assert core.stats().num_anchors == 0
    assert core.pool.counts().used == 0
    read(core, 1, text=0)
    assert core.stats().num_anchors == 1
