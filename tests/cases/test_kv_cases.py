"""Areas 8, 9 and 10 as plain chat meets them. The names are ids of docs/cases.md."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from app_client import CHAT
from byte_server import ByteServer, byte_server
from events import error_of, read_stream

from relaykv.engine.prefix_cache import block_hash, root_hash

ANSWER: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ByteServer]:
    with byte_server() as running:
        yield running
        running.assert_idle()


def body(content: str, **fields: Any) -> dict[str, Any]:
    return {**ANSWER, "messages": [{"role": "user", "content": content}], **fields}


def ids_of(answer: dict[str, Any], index: int = 0) -> list[Any]:
    return [entry["bytes"] for entry in answer["choices"][index]["logprobs"]["content"]]


def cached(answer: dict[str, Any]) -> int:
    count = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(count, int)
    assert 0 <= count < answer["usage"]["prompt_tokens"]
    return count


def test_kv_01_warm_and_crowded_answers_are_the_cold_ones(server: ByteServer) -> None:
    bodies = [body(f"{number:03}" + "k" * number) for number in range(60, 112)]  # block borders
    pairs = [[server.client.chat(**item).json() for _ in range(2)] for item in bodies]
    assert all(cached(warm) > 0 for _, warm in pairs)
    assert all(ids_of(warm) == ids_of(cold) for cold, warm in pairs)
    crowded = [a for at in range(0, 52, 8) for a in server.chat_all(bodies[at : at + 8])]
    assert [ids_of(answer) for answer in crowded] == [ids_of(cold) for cold, _ in pairs]


@pytest.mark.parametrize("num_tokens", [63, 64, 65, 80])
def test_kv_03_a_prompt_that_is_cached_whole_is_answered_the_same(
    server: ByteServer, num_tokens: int
) -> None:
    item = body(f"{num_tokens}".rjust(num_tokens - 19, "w"))
    answers = [server.client.chat(**item).json() for _ in range(3)]
    assert {answer["usage"]["prompt_tokens"] for answer in answers} == {num_tokens}
    assert cached(answers[1]) <= num_tokens - 1
    assert [ids_of(answer) for answer in answers] == [ids_of(answers[0])] * 3


def test_kv_04_branches_of_one_prefix_do_not_change_each_other(server: ByteServer) -> None:
    prefix = "a shared beginning of three blocks and a bit more "
    items = [body(prefix + end, max_tokens=40) for end in ("one", "two", "three", "four")]
    with byte_server() as fresh:
        cold = [ids_of(fresh.client.chat(**item).json()) for item in items]
    for order in ((0, 1, 0), (2, 3, 1, 0)):
        assert [ids_of(server.client.chat(**items[i]).json()) for i in order] == [
            cold[i] for i in order
        ]
    for _ in range(5):
        assert [ids_of(answer) for answer in server.chat_all(items)] == cold


def test_kv_06_constant_eviction_mixes_up_no_answers() -> None:
    chooser = random.Random(6)
    items = [body(f"marker {number} " * 3, max_tokens=12) for number in range(12)]
    with byte_server() as large:
        expected = [ids_of(large.client.chat(**item).json()) for item in items]
    with byte_server(num_blocks=24, max_model_len=240) as small:
        for number in range(15):
            chosen = [chooser.randrange(12) for _ in range(5)]
            policy = {"policy": "full"}  # exact, so that every answer is known
            sessions = [{"relay_session": f"s{number % 4}", "relay": policy}, {}]
            wanted = [{**items[i], **chooser.choice(sessions)} for i in chosen]
            answers = small.chat_all(wanted)
            assert [ids_of(answer) for answer in answers] == [expected[i] for i in chosen]
            small.assert_idle()


def test_kv_07_every_difference_gives_another_block_hash() -> None:
    tokens = tuple(range(40, 56))
    swapped = (tokens[0] + 31, tokens[1] - 1, *tokens[2:])
    hashes = set()
    for model in ("model", "model of another dtype"):
        for tenant in ("", "a"):
            for content in (tokens, swapped, tokens[::-1]):
                first = block_hash(root_hash(model, tenant), content)
                hashes |= {first, block_hash(first, content), block_hash(first, content, b"salt")}
    # Two models, two tenants, three contents; first, second, and second as approximate KV.
    assert len(hashes) == 2 * 2 * 3 * 3
    assert {len(value) for value in hashes} == {32}


def test_kv_08_an_answer_that_tokenises_differently_is_computed_from_its_own_tokens() -> None:
    for seed in range(6):  # random bytes: U+FFFD in the text, other tokens on the way back
        with byte_server(max_model_len=480) as running, byte_server() as fresh:
            asked = [{"role": "user", "content": "write"}]
            fields = {"temperature": 1, "seed": seed, "relay_session": "s"}
            answer = running.client.chat(messages=asked, **fields, max_tokens=60).json()
            messages = [*asked, answer["choices"][0]["message"], {"role": "user", "content": "on"}]
            exact = {"relay": {"policy": "full"}, "relay_session": "s"}
            again = running.client.chat(**{**ANSWER, **exact, "messages": messages}).json()
            cold = fresh.client.chat(**{**ANSWER, "messages": messages}).json()
            assert ids_of(again) == ids_of(cold)


def test_kv_09_generated_tokens_are_found_again() -> None:
    prompt, answer = "p" * 50, "generated text: " * 4
    url, fields = "/v1/completions", {"max_tokens": 46, "temperature": 0}
    with byte_server() as running:
        running.run_script(answer)
        first = running.client.post(url, json={"prompt": prompt, **fields}).json()
        assert first["choices"][0]["text"] == answer[:46]
        longer = {"prompt": f"{prompt}{answer[:46]} and on", **fields}
        assert cached(running.client.post(url, json=longer).json()) == 80  # whole blocks of 95


def test_kv_18_nothing_approximate_without_a_session(server: ByteServer) -> None:
    text = "a text that is long enough to be relayed from one agent to the next one"
    item = body("say: " + text)
    plain = server.client.chat(**item).json()
    server.client.chat(**body(text), relay_session="lossy")
    again = server.client.chat(**item).json()
    assert "relay" not in again
    assert ids_of(again) == ids_of(plain)
    exact = server.client.chat(**item, relay_session="lossy", relay={"policy": "full"}).json()
    assert exact["relay"]["policy"] == "full"
    assert exact["relay"]["tokens"]["relayed"] == 0
    assert ids_of(exact) == ids_of(plain)
    labelled = server.client.chat(
        **body("and say: " + text), relay_session="lossy", relay={"policy": "shift"}
    ).json()
    assert labelled["relay"]["policy"] == "shift"
    assert labelled["relay"]["tokens"]["relayed"] > 0
    server.client.request("DELETE", "/v1/relay/sessions/lossy")


def test_kv_20_log_probabilities_are_those_of_a_cold_run(server: ByteServer) -> None:
    item = body("log-probabilities of a prompt " * 3, top_logprobs=3, n=2)
    cold, warm = (server.client.chat(**item).json() for _ in range(2))
    assert cached(warm) > 0
    for index in range(2):
        pairs = zip(
            cold["choices"][index]["logprobs"]["content"],
            warm["choices"][index]["logprobs"]["content"],
            strict=True,
        )
        for one, other in pairs:
            assert one["bytes"] == other["bytes"]
            assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)


def test_kv_20_echoed_log_probabilities_do_not_depend_on_the_cache(server: ByteServer) -> None:
    item = {"prompt": "what stands in a prompt " * 4, "echo": True, "logprobs": 2, "max_tokens": 3}
    fill = {**item, "echo": False}
    cold = server.client.post("/v1/completions", json={**item, "temperature": 0}).json()
    assert server.client.post("/v1/completions", json=fill).status_code == 200
    warm = server.client.post("/v1/completions", json={**item, "temperature": 0}).json()
    assert cached(warm) == 0
    one, other = (answer["choices"][0]["logprobs"] for answer in (cold, warm))
    assert one["tokens"] == other["tokens"]
    assert len(one["tokens"]) == cold["usage"]["total_tokens"]
    assert one["token_logprobs"][0] is None
    assert one["token_logprobs"][1:] == pytest.approx(other["token_logprobs"][1:], abs=1e-4)


def test_kv_21_what_others_relay_changes_no_exact_answer(server: ByteServer) -> None:
    item = body("what ran before must not matter, whatever it was")
    alone = ids_of(server.client.chat(**item).json())
    for number in range(6):
        for session in ("x", "y"):
            content = f"{number} what ran before must not matter, whatever it was, to {session}"
            server.client.chat(**body(content), relay_session=session)
    assert ids_of(server.client.chat(**item).json()) == alone
    other_key = {"Authorization": "Bearer other"}
    response = server.client.post("/v1/chat/completions", json=item, headers=other_key)
    assert ids_of(response.json()) == alone


def test_is_01_another_key_sees_a_cold_cache(server: ByteServer) -> None:
    item = body("a secret system prompt of one tenant " * 4)
    keys = [{"Authorization": f"Bearer {key}"} for key in ("k1", "k1", "k2", "k2")]
    counts = [
        cached(server.client.post("/v1/chat/completions", json=item, headers=key).json())
        for key in keys
    ]
    assert counts[0] == counts[2] == 0
    assert counts[1] == counts[3] > 0


def test_is_02_a_session_belongs_to_its_key(server: ByteServer) -> None:
    first, second = ({"Authorization": f"Bearer {key}"} for key in ("owner", "guest"))
    text = "the plan that the first crew has made for this week, in every detail"
    url, session = "/v1/chat/completions", {"relay_session": "crew-1"}
    server.client.post(url, json=body(text, **session), headers=first)
    assert server.client.get("/v1/relay/sessions", headers=second).json()["data"] == []
    for method in ("GET", "DELETE"):
        for name in ("crew-1", "never-seen"):
            path = f"/v1/relay/sessions/{name}"
            error_of(server.client.request(method, path, headers=second), 404)
    stolen = server.client.post(url, json=body("x " + text, **session), headers=second).json()
    assert stolen["relay"]["tokens"]["relayed"] == stolen["relay"]["tokens"]["prefix"] == 0
    owned = server.client.post(url, json=body("x " + text, **session), headers=first).json()
    assert owned["relay"]["tokens"]["relayed"] > 0
    for name in ("a\nb", "x" * 257, "\x00"):
        assert error_of(server.client.chat(relay_session=name), 400)["param"] == "relay_session"
    for name in ("../../etc", "é 猫", " "):
        assert server.client.chat(relay_session=name, max_tokens=1).status_code == 200
    assert server.client.chat(relay_session="", max_tokens=1).json().get("relay") is None


def test_is_04_crowded_answers_belong_to_their_requests() -> None:
    chooser = random.Random(4)
    with byte_server(num_blocks=120) as running:
        items = [body(f"agent {n}: " + "w" * (n * 7 % 60), max_tokens=8 + n) for n in range(16)]
        solo = [running.client.chat(**item).json() for item in items]
        for _ in range(6):
            order = chooser.sample(range(16), 16)
            answers = running.chat_all([items[i] for i in order])
            for i, answer in zip(order, answers, strict=True):
                assert ids_of(answer) == ids_of(solo[i])
                pairs = zip(
                    answer["choices"][0]["logprobs"]["content"],
                    solo[i]["choices"][0]["logprobs"]["content"],
                    strict=True,
                )
                assert all(a["logprob"] == pytest.approx(b["logprob"], abs=1e-4) for a, b in pairs)


def test_se_01_overlapping_turns_of_a_session_all_finish(server: ByteServer) -> None:
    items = [body(f"branch {n} of the fan-out", relay_session="fan") for n in range(3)]
    assert len(server.chat_all(items)) == 3
    assert server.client.chat(**body("and on", relay_session="fan")).status_code == 200
    session = server.client.get("/v1/relay/sessions/fan").json()
    assert len(session["recordings"]) == 4
    for status in (200, 404):
        response = server.client.request("DELETE", "/v1/relay/sessions/fan")
        assert response.status_code == status
    server.assert_idle()


def test_se_03_a_session_may_be_deleted_while_it_is_used(server: ByteServer) -> None:
    text = "a plan that is relayed while its session is being deleted, again and again"
    expected = ids_of(server.client.chat(**body(text)).json())

    async def race(client: httpx.AsyncClient, number: int) -> None:
        chat = asyncio.create_task(
            client.post(CHAT, json=body(text, relay_session="gone", relay={"policy": "full"}))
        )
        for _ in range(number % 5):
            await asyncio.sleep(0.002)
        deleted = await client.delete("/v1/relay/sessions/gone")
        assert deleted.status_code in (200, 404)
        assert ids_of((await chat).json()) == expected

    async def races() -> None:
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for number in range(20):
                await race(client, number)
            await client.delete("/v1/relay/sessions/gone")
            assert (await client.delete("/v1/relay/sessions/gone")).status_code == 404

    asyncio.run(races())
    server.assert_idle()


def test_se_04_sessions_that_nobody_closes_block_nobody() -> None:
    with byte_server(num_blocks=40, max_model_len=240) as small:
        for turn in range(4):
            items = [
                body(f"session {n} turn {turn} " + "z" * 40, relay_session=f"agent {n}")
                for n in range(12)
            ]
            assert len(small.chat_all(items)) == 12
        assert small.client.chat(**body("no session")).status_code == 200
        small.assert_idle()


def test_se_05_a_session_never_seen_starts_cold(server: ByteServer) -> None:
    answer = server.client.chat(**body("0 nobody knows it", relay_session="unheard of")).json()
    assert cached(answer) == 0
    assert answer["relay"]["session"] == "unheard of"


def test_se_06_conversations_with_one_beginning_keep_their_own_history() -> None:
    system = {"role": "system", "content": "a system prompt that both conversations share " * 2}
    with byte_server(num_blocks=300) as running:
        histories: dict[str, list[Any]] = {"A": [system], "B": [system]}
        seen: dict[str, int] = {}
        for turn in range(4):
            for name, history in histories.items():
                history.append({"role": "user", "content": f"{name} turn {turn}"})
                chat = {**ANSWER, "messages": history, "relay_session": name, "max_tokens": 8}
                answer = running.client.chat(**chat, relay={"policy": "full"}).json()
                if turn > 0:  # all but the last answer, whose bytes may read otherwise now
                    assert cached(answer) >= seen[name] - 16
                history.append({"role": "assistant", "content": f"answer {turn}"})
                seen[name] = answer["usage"]["prompt_tokens"]
            running.client.chat(**body(f"one shot {turn}"))
        running.assert_idle()


def test_se_10_cached_tokens_are_always_told(server: ByteServer) -> None:
    item = body("10 times a cold prompt that is then a warm one")
    for fields in ({}, {}, {"n": 2}, {"relay_session": "usage"}):
        plain = server.client.chat(**item, **fields).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = read_stream(server.client.chat(**item, **fields, **options))
        usage = stream.chunks[-1]["usage"]
        assert cached(plain) <= cached({"usage": usage})
        assert usage["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    text = {"prompt": "cold text", "max_tokens": 1}
    assert cached(server.client.post("/v1/completions", json=text).json()) == 0
