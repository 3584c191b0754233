"""Cores with and without overlap, and what all callers of such a core were told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from engine_factory import POLICIES, EngineSizes, FakeEngine
from tiny_core import Result, SpellingTokenizer, take

from relaykv.engine.config import RelayConfig
from relaykv.engine.core import EngineCore
from relaykv.engine.model_runner import ModelRunner
from relaykv.engine.request import GenerateRequest
from relaykv.engine.tokenizer import Tokenizer

SMALL = EngineSizes()
EOS_TOKEN_IDS = frozenset(range(40))  # of the fake runner: every 25th token


def fake_core(overlap: bool, sizes: EngineSizes) -> tuple[FakeEngine, EngineCore]:
    """A core around a fake runner; with overlap that runner defers all it can."""
    engine = FakeEngine(sizes, deferred=overlap)
    core = EngineCore(
        runner=cast(ModelRunner, engine.runner),
        tokenizer=cast(Tokenizer, SpellingTokenizer()),
        scheduler=engine.scheduler,
        pool=engine.pool,
        recordings=engine.recordings,
        policies=POLICIES,
        relay=RelayConfig(default_policy="shift"),
        block_size=sizes.block_size,
        eos_token_ids=EOS_TOKEN_IDS,
        max_model_len=sizes.max_model_len,
        bytes_per_block=1,
        overlap=overlap,
    )
    return engine, core


@dataclass(slots=True)
class Story:
    """What came of every request, without the moment at which it happened."""

    results: dict[str, Result] = field(default_factory=dict)
    recordings: dict[str, tuple[object, ...]] = field(default_factory=dict)

    def told(self, request_id: str) -> tuple[object, ...]:
        result = self.results[request_id]
        entries = [(o.logprobs, o.prompt_logprobs, o.usage) for o in result.outputs]
        last = result.outputs[-1] if result.outputs else None
        end = None if last is None else (last.finish_reason, last.usage, last.relay)
        return result.token_ids, result.text, entries, end


def play(
    core: EngineCore,
    requests: Sequence[GenerateRequest],
    after: Mapping[str, str] | None = None,
    aborts: Mapping[str, int] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Story:
    """Serves requests until all have ended.

    Args:
        after: by request, another one whose end it waits for.
        aborts: by request, how many tokens its caller takes before it goes away.
        check: called after every step.
    """
    after, aborts = after or {}, aborts or {}
    story = Story({request.request_id: Result() for request in requests})
    unsent = list(requests)
    ended = set[str]()
    for _ in range(20_000):
        for item in list(unsent):
            if after.get(item.request_id) in (None, *ended):
                core.add(item)
                unsent.remove(item)
        if not core.has_work:
            break
        for output in core.step():
            take(story.results[output.request_id], output)
            if output.finish_reason is not None:
                assert output.request_id not in ended
                ended.add(output.request_id)
        for request_id, count in aborts.items():
            num_told = len(story.results[request_id].token_ids)
            if request_id not in ended and num_told >= count and request_id in core._answers:
                core.abort(request_id)
                ended.add(request_id)
        check()
    assert not unsent
    assert ended == story.results.keys()
    assert core.stats().num_used_blocks == 0
    for key, recordings, _ in core.recordings.sessions(""):
        for r in recordings:
            entry = (key, r.token_ids, len(r.blocks), r.num_prompt_tokens, r.taint)
            story.recordings[r.request_id] = entry
    return story


def assert_same(one: Story, other: Story) -> None:
    """Everybody was told the same, and the sessions hold the same."""
    assert one.results.keys() == other.results.keys()
    for request_id in one.results:
        assert one.told(request_id) == other.told(request_id)
    assert one.recordings == other.recordings


def play_both(
    requests: Sequence[GenerateRequest],
    after: Mapping[str, str] | None = None,
    aborts: Mapping[str, int] | None = None,
    sizes: EngineSizes = SMALL,
) -> tuple[Story, EngineCore]:
    """Plays without and with overlap, asserts that nobody can tell, and returns the latter."""
    engine, core = fake_core(False, sizes)
    expected = play(core, requests, after, aborts, engine.check)
    engine, core = fake_core(True, sizes)
    story = play(core, requests, after, aborts, engine.check)
    assert_same(story, expected)
    return story, core


def num_in_flight(core: EngineCore) -> list[int]:
    """After every launch, how many steps were in flight."""
    counts, count = [], 0
    for kind, _ in core.runner.events:  # type: ignore[attr-defined]
        count += 1 if kind == "launch" else -1
        if kind == "launch":
            counts.append(count)
    assert count == 0
    return counts
