"""The whole engine on a tiny model: batching, reuse that must be exact, relay that is labelled."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from dense_forward import dense_logits
from tiny_core import Result, ids, request, run, take, tiny_core, tiny_model

from relaykv.engine.core import EngineCore
from relaykv.engine.request import FinishReason


def _greedy(prompt: list[int], count: int) -> list[int]:
    """The reference: a full forward for every token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(dense_logits(tiny_model(), tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def _accounts(core: EngineCore) -> None:
    stats = core.stats()
    assert stats.num_used_blocks == 0
    assert (
        stats.num_free_blocks + stats.num_cached_blocks + stats.num_recorded_blocks
        == stats.num_total_blocks
    )


def test_a_single_request_gives_the_models_own_greedy_tokens() -> None:
    prompt = ids(1, 90)
    (result,) = run(tiny_core(), request("a", prompt, 25))
    assert result.token_ids == _greedy(prompt, 25)
    assert result.last.finish_reason is FinishReason.LENGTH
    assert [o.finish_reason for o in result.outputs[:-1]] == [None] * 24
    assert result.text == "".join(f"{token} " for token in result.token_ids)


def test_a_batch_gives_what_single_runs_give() -> None:
    prompts = [ids(seed, 15 + 23 * seed) for seed in range(7)]
    alone = [run(tiny_core(), request("x", prompt, 30))[0].token_ids for prompt in prompts]
    together = run(tiny_core(), *(request(str(i), prompt, 30) for i, prompt in enumerate(prompts)))
    assert [result.token_ids for result in together] == alone


def test_requests_that_join_a_running_batch_do_not_change_it() -> None:
    prompts = [ids(seed, 40) for seed in range(5)]
    alone = [run(tiny_core(), request("x", prompt, 24))[0].token_ids for prompt in prompts]
    core = tiny_core(max_num_batched_tokens=16)
    results = {str(i): Result() for i in range(5)}
    waiting = [request(str(i), prompt, 24) for i, prompt in enumerate(prompts)]
    for step in itertools.count():
        if step % 3 == 0 and waiting:
            core.add(waiting.pop())
        for output in core.step():
            take(results[output.request_id], output)
        if not waiting and not core.has_work:
            break
    assert [result.token_ids for result in results.values()] == alone


def test_preempted_requests_give_what_they_give_alone() -> None:
    prompts = [ids(seed, 50) for seed in range(4)]
    alone = [run(tiny_core(), request("x", prompt, 60))[0].token_ids for prompt in prompts]
    core = tiny_core(num_blocks=20, max_model_len=320)  # two of them need 14 blocks
    together = run(core, *(request(str(i), prompt, 60) for i, prompt in enumerate(prompts)))
    assert core.stats().num_preemptions > 0
    assert [result.token_ids for result in together] == alone
    _accounts(core)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48, 64, 65])
def test_warm_equals_cold_around_the_block_size(length: int) -> None:
    prompt = ids(2, length)
    core = tiny_core()
    (cold,) = run(core, request("cold", prompt, 20))
    (warm,) = run(core, request("warm", prompt, 20))
    assert warm.token_ids == cold.token_ids == _greedy(prompt, 20)
    assert cold.last.usage.num_cached_tokens == 0
    assert warm.last.usage.num_cached_tokens == (length - 1) // 16 * 16


def test_a_prompt_that_goes_on_from_an_answer_hits_the_answers_blocks() -> None:
    core = tiny_core()
    prompt = ids(3, 40)
    (first,) = run(core, request("first", prompt, 30))
    longer = prompt + first.token_ids + ids(4, 10)
    (second,) = run(core, request("second", longer, 10))
    assert second.last.usage.num_cached_tokens == (40 + 29) // 16 * 16
    assert second.token_ids == _greedy(longer, 10)


def test_a_session_that_holds_nothing_changes_nothing() -> None:
    prompt = ids(5, 70)
    (result,) = run(tiny_core(), request("a", prompt, 20, session="s"))
    assert result.token_ids == _greedy(prompt, 20)
    assert result.relay.reason == "the session holds no recordings yet"
    assert result.relay.num_computed_tokens == 70


def _handoff(core: EngineCore, session: str = "s") -> tuple[list[int], list[int]]:
    """A producer's answer of 60 tokens in a session, and a consumer's prompt that embeds it."""
    (producer,) = run(core, request("producer", ids(6, 33), 61, session=session))
    output = producer.token_ids[:60]
    return output, ids(7, 47) + output + ids(8, 12)


@pytest.mark.parametrize("policy", ["shift", "epic", "cacheblend", "relay"])
def test_a_handoff_is_relayed_and_its_tokens_are_counted(policy: str) -> None:
    core = tiny_core()
    output, prompt = _handoff(core)
    (consumer,) = run(core, request("consumer", prompt, 5, session="s", policy=policy))
    report = consumer.relay
    assert report.policy == policy
    assert report.session == "s"
    counts = (
        report.num_prefix_tokens,
        report.num_relayed_tokens,
        report.num_recomputed_tokens,
        report.num_computed_tokens,
    )
    assert sum(counts) == len(prompt)
    assert report.num_relayed_tokens + report.num_recomputed_tokens == len(output)
    assert [(s.start, s.stop, s.source_request_id) for s in report.segments] == [
        (47, 107, "producer")
    ]
    assert report.segments[0].source_start == 33
    assert report.segments[0].num_recomputed_tokens == report.num_recomputed_tokens
    assert consumer.last.usage.num_cached_tokens == report.num_relayed_tokens
    assert 0.0 <= report.recomputed_share < 1.0
    assert (policy == "shift") == (report.num_recomputed_tokens == 0)


def test_approximate_kv_is_never_served_as_an_exact_prefix() -> None:
    core = tiny_core()
    _, prompt = _handoff(core)
    cold = _greedy(prompt, 15)
    (relayed,) = run(core, request("relayed", prompt, 15, session="s", policy="shift"))
    assert relayed.relay.num_relayed_tokens == 60
    (plain,) = run(core, request("plain", prompt, 15))
    assert plain.token_ids == cold
    # The blocks in front of the segment are exact, and only they are hit.
    assert plain.last.usage.num_cached_tokens == 47 // 16 * 16


@pytest.mark.parametrize(
    ("session", "policy", "tenant"),
    [("s", "full", ""), ("other", "shift", ""), ("s", "shift", "someone else")],
)
def test_only_the_same_session_tenant_and_policy_reads_approximate_kv(
    session: str, policy: str, tenant: str
) -> None:
    core = tiny_core()
    _, prompt = _handoff(core)
    run(core, request("relayed", prompt, 15, session="s", policy="shift", store=False))
    stranger = request("x", prompt, 15, session=session, policy=policy, tenant=tenant)
    (result,) = run(core, stranger)
    assert result.token_ids == _greedy(prompt, 15)
    assert result.relay.num_relayed_tokens == 0


def test_the_same_session_and_policy_may_hit_its_own_approximate_blocks() -> None:
    core = tiny_core()
    _, prompt = _handoff(core)
    (first,) = run(core, request("one", prompt, 15, session="s", policy="shift", store=False))
    (again,) = run(core, request("two", prompt, 15, session="s", policy="shift", store=False))
    assert again.relay.num_prefix_tokens == (len(prompt) - 1) // 16 * 16
    assert again.token_ids == first.token_ids


def test_a_relay_prefill_runs_beside_decodes_and_changes_none_of_them() -> None:
    core = tiny_core(max_num_batched_tokens=32)
    _, prompt = _handoff(core)
    alone = run(core, request("alone", prompt, 10, session="s", policy="relay", store=False))[
        0
    ].token_ids
    plain = ids(9, 20)
    other = tiny_core(max_num_batched_tokens=32)
    _handoff(other)
    results = run(
        other,
        request("decode", plain, 40),
        request("relay", prompt, 10, session="s", policy="relay", store=False),
        request("more", ids(10, 75), 12),
    )
    assert results[0].token_ids == _greedy(plain, 40)
    assert results[1].token_ids == alone
    assert results[2].token_ids == _greedy(ids(10, 75), 12)
    assert results[1].relay.num_relayed_tokens > 0


def test_two_segments_in_swapped_order_and_one_twice_are_all_relayed() -> None:
    core = tiny_core(num_blocks=512)
    (one,) = run(core, request("one", ids(11, 20), 50, session="s"))
    run(core, request("between", ids(12, 90), 30, session="s"))
    (two,) = run(core, request("two", ids(13, 30), 50, session="s"))
    a, b = one.token_ids[:45], two.token_ids[:45]
    prompt = ids(14, 15) + b + ids(15, 5) + a + ids(16, 5) + b + ids(17, 9)
    (reader,) = run(core, request("reader", prompt, 4, session="s", policy="shift"))
    sources = [(s.start, s.stop, s.source_request_id) for s in reader.relay.segments]
    assert sources == [(15, 60, "two"), (65, 110, "one"), (115, 160, "two")]


def test_an_abort_at_any_moment_frees_every_block() -> None:
    prompt = ids(18, 100)
    for num_steps in range(12):
        core = tiny_core(max_num_batched_tokens=32)
        core.add(request("a", prompt, 8, session="s"))
        core.add(request("b", prompt[:50] + ids(19, 60), 8))
        for _ in range(num_steps):
            core.step()
        core.abort("a")
        core.abort("b")
        core.abort("never heard of")
        assert not core.has_work
        _accounts(core)
        (after,) = run(core, request("c", prompt, 8))
        assert after.token_ids == _greedy(prompt, 8)


def test_an_aborted_answer_is_recorded_as_far_as_the_client_saw_it() -> None:
    core = tiny_core()
    core.add(request("a", ids(20, 40), 50, session="s"))
    seen = 0
    while seen < 21:
        seen += sum(len(output.token_ids) for output in core.step())
    core.abort("a")
    (info,) = core.sessions("")
    (recording,) = info.recordings
    assert (recording.num_prompt_tokens, recording.num_output_tokens) == (40, 20)


def test_a_failing_step_ends_its_requests_and_the_next_one_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = tiny_core()
    prompt = ids(21, 30)
    core.add(request("a", prompt, 5))
    with monkeypatch.context() as patch:

        def explode(_: object) -> None:
            raise RuntimeError("out of cheese")

        patch.setattr(core.runner, "launch", explode)
        (output,) = core.step()
    assert output.finish_reason is FinishReason.ERROR
    assert output.error is not None
    _accounts(core)
    assert run(core, request("b", prompt, 5))[0].token_ids == _greedy(prompt, 5)


def test_stop_strings_and_stop_tokens_end_the_answer() -> None:
    prompt = ids(22, 30)
    tokens = _greedy(prompt, 12)
    word = f"{tokens[6]} "
    first = next(i for i, t in enumerate(tokens) if f"{t} ".endswith(word))
    (text,) = run(tiny_core(), request("a", prompt, 12, stop=(word,)))
    assert text.last.finish_reason is FinishReason.STOP
    assert text.text == "".join(f"{t} " for t in tokens).split(word)[0]
    (token,) = run(tiny_core(), request("a", prompt, 12, stop_token_ids=(tokens[6],)))
    assert token.token_ids == tokens[: tokens.index(tokens[6])]
    assert token.last.finish_reason is FinishReason.STOP
    assert first <= 6


def test_penalties_do_not_depend_on_what_was_cached() -> None:
    prompt = ids(23, 64)
    extra: dict[str, Any] = {
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
    }
    core = tiny_core()
    (cold,) = run(core, request("cold", prompt, 20, **extra))
    (warm,) = run(core, request("warm", prompt, 20, **extra))
    (plain,) = run(core, request("plain", prompt, 20))
    assert warm.token_ids == cold.token_ids
    assert plain.token_ids != cold.token_ids


def test_a_seed_gives_the_same_answer_alone_and_in_a_batch() -> None:
    sampling: dict[str, Any] = {"temperature": 1.5, "seed": 11}
    prompt = ids(24, 30)
    (alone,) = run(tiny_core(), request("a", prompt, 20, **sampling))
    together = run(
        tiny_core(),
        request("x", ids(25, 50), 20, temperature=1.0),
        request("a", prompt, 20, **sampling),
        request("y", ids(26, 9), 20, temperature=1.0),
    )
    assert together[1].token_ids == alone.token_ids
    (other,) = run(tiny_core(), request("a", prompt, 20, temperature=1.5, seed=12))
    assert other.token_ids != alone.token_ids


def test_blocks_add_up_after_any_mix_of_requests_aborts_and_preemptions() -> None:
    chooser = random.Random(5)
    core = tiny_core(num_blocks=48, max_model_len=300, max_num_requests=6)
    texts = [ids(seed, 40) for seed in range(6)]
    finished, aborted, running = 0, 0, set[str]()
    for number in range(200):
        prompt = [t for text in chooser.sample(texts, chooser.randint(1, 4)) for t in text]
        session = chooser.choice([None, "s", "t"])
        policy = chooser.choice([None, "full", "shift", "epic", "cacheblend", "relay"])
        name = str(number)
        core.add(request(name, prompt, chooser.randint(1, 60), session=session, policy=policy))
        running.add(name)
        for _ in range(chooser.randint(0, 12)):
            for output in core.step():
                if output.finish_reason is not None:
                    assert output.finish_reason is FinishReason.LENGTH
                    running.remove(output.request_id)
                    finished += 1
        if running and chooser.random() < 0.2:
            victim = chooser.choice(sorted(running))
            core.abort(victim)
            running.remove(victim)
            aborted += 1
        stats = core.stats()
        blocks = stats.num_free_blocks + stats.num_cached_blocks + stats.num_recorded_blocks
        assert blocks + stats.num_used_blocks == stats.num_total_blocks
    while core.has_work:
        finished += sum(output.finish_reason is not None for output in core.step())
    assert finished + aborted == 200
    assert aborted > 10
    assert core.stats().num_preemptions > 0
    _accounts(core)


def _prompt_logprobs(prompt: list[int]) -> list[float]:
    logprobs = dense_logits(tiny_model(), prompt).log_softmax(-1)
    return [float(logprobs[i, token]) for i, token in enumerate(prompt[1:])]


@pytest.mark.parametrize("budget", [7, 64])
def test_log_probabilities_of_the_prompt_are_those_of_a_dense_forward(budget: int) -> None:
    prompt = ids(27, 75)
    core = tiny_core(max_num_batched_tokens=budget)
    run(core, request("warms the prefix cache", prompt, 3, session="s"))
    scored, plain = run(
        core,
        request("scored", prompt, 6, session="s", num_prompt_logprobs=2, num_logprobs=1),
        request("plain", ids(28, 40), 6),
    )
    first = scored.outputs[0]
    assert [entry.token_id for entry in first.prompt_logprobs] == prompt[1:]
    found = [entry.logprob for entry in first.prompt_logprobs]
    assert found == pytest.approx(_prompt_logprobs(prompt), abs=1e-4)
    assert all(len(entry.top) == 2 for entry in first.prompt_logprobs)
    assert not any(output.prompt_logprobs for output in scored.outputs[1:])
    assert scored.last.usage.num_cached_tokens == 0
    assert "log-probabilities" in scored.relay.reason
    assert scored.token_ids == _greedy(prompt, 6)
    assert plain.token_ids == _greedy(ids(28, 40), 6)
    assert not any(output.prompt_logprobs for output in plain.outputs)
