"""The TTFT benchmark against a fake server, with small numbers."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import ttft
from fake_server import FakeServer
from ttft_prompts import MAX_AGENTS, exact_role, task

FAKE_COMMAND = (sys.executable, str(Path(__file__).parents[1] / "clients" / "fake_server.py"))
SMALL = ["--agents", "3", "--repeats", "2", "--role-tokens", "64", "--output-tokens", "40"]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        threading.Thread(target=fake.serve_forever, daemon=True).start()
        yield fake
        fake.shutdown()


def at(server: FakeServer) -> list[str]:
    return ["--url", server.url, "--ready-timeout", "10"]


def count_words(text: str) -> int:
    return len(text.split())


def test_every_agent_is_measured_with_every_policy_and_the_table_adds_up(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = tmp_path / "raw.json"
    assert ttft.main([*at(server), *SMALL, "--json", str(raw)]) == 0
    samples = json.loads(raw.read_text())["samples"]
    assert Counter((s["agent"], s["policy"]) for s in samples) == {
        (agent, policy): 2 for agent in (1, 2, 3) for policy in ttft.POLICIES
    }
    for sample in samples:
        assert sample["prefix"] == 65  # the role prompt and its tag
        kinds = [sample[kind] for kind in ("prefix", "relayed", "recomputed", "computed")]
        assert sum(kinds) == sample["prompt_tokens"]
        found = 0 if sample["policy"] == "full" else 40 * (sample["agent"] - 1)
        assert sample["relayed"] + sample["recomputed"] == found
    assert len({s["prompt_tokens"] for s in samples if s["agent"] == 3}) == 1
    out = capsys.readouterr().out
    assert "machine: " in out
    assert "command: python benchmarks/ttft.py --url" in out
    assert "agent 2 wrote 40 tokens" in out
    assert out.count("1.00 x") >= 3
    assert all(len(line) <= 110 for line in out.splitlines() if not line.startswith("command"))


def test_measured_prompts_share_only_the_role_prompt_and_are_not_stored(
    server: FakeServer,
) -> None:
    assert ttft.main([*at(server), *SMALL]) == 0
    measured = [b for b in server.requests if b.get("relay", {}).get("store") is False]
    assert len(measured) == 3 * 3 * len(ttft.POLICIES)  # one warm-up round and two measured
    assert all(body["max_tokens"] == 1 for body in measured)
    heads = [body["messages"][-1]["content"].split("\n")[0] for body in measured]
    assert len(set(heads)) == len(heads)
    produced = [b for b in server.requests if b.get("relay", {}).get("store") is True]
    assert [body["ignore_eos"] for body in produced] == [True, True]
    sessions = {body["relay_session"] for body in measured + produced}
    assert len(sessions) == 1
    warm = [body for body in server.requests if "relay_session" not in body]
    assert len(warm) == 3
    # Agent 2 must not find its own prompt in the session: it writes after it was measured.
    order = [server.requests.index(body) for body in (measured[-1], produced[-1])]
    agent_2 = [b for b in measured if b["messages"][0] == produced[1]["messages"][0]]
    assert max(server.requests.index(body) for body in agent_2) < order[1]


def test_policies_are_interleaved_in_a_moving_order(server: FakeServer) -> None:
    few = ["--policies", "full", "relay", "--warmups", "0"]
    assert ttft.main([*at(server), *SMALL, *few]) == 0
    measured = [b["relay"]["policy"] for b in server.requests if b.get("max_tokens") == 1 and
                "relay" in b]  # fmt: skip
    assert measured[:4] == ["full", "relay", "relay", "full"]


def test_the_ratio_is_that_of_the_medians() -> None:
    def sample(policy: str, repeat: int, first_token_s: float) -> ttft.Sample:
        return ttft.Sample(2, policy, repeat, first_token_s, 100, 60, 20, 10, 10, 0.25, 0.175, None)

    times = {"full": (0.9, 1.0, 5.0), "relay": (0.2, 0.25, 0.9)}
    samples = [
        sample(policy, repeat, time)
        for policy, row in times.items()
        for repeat, time in enumerate(row)
    ]
    table = ttft.format_table(samples, ("full", "relay")).splitlines()
    assert table[2].endswith("1.00 x")
    assert table[3].endswith("4.00 x")
    assert table[3].split()[-5:-2] == ["17.5", "250", "200-900"]


def test_it_starts_and_stops_a_server_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("FAKE_SERVER_PID", str(pid_file))
    assert ttft.main([*SMALL, "--repeats", "1"], FAKE_COMMAND) == 0
    assert not Path(f"/proc/{pid_file.read_text()}").exists()


def test_a_failure_is_one_message_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert ttft.main(["--policies", "relay"]) == 1
    assert "`full` must be among" in capsys.readouterr().err
    assert ttft.main(["--url", "http://127.0.0.1:9"]) == 1
    assert "no server answers" in capsys.readouterr().err


@pytest.mark.parametrize("num_tokens", [1, 17, 512])
def test_role_prompts_have_exactly_the_wanted_length_and_differ(num_tokens: int) -> None:
    roles = [exact_role(index, num_tokens, count_words) for index in range(MAX_AGENTS)]
    assert [count_words(role) for role in roles] == [num_tokens] * MAX_AGENTS
    assert num_tokens == 1 or len(set(roles)) == MAX_AGENTS


def test_fillers_close_the_gap_that_whole_words_leave() -> None:
    def characters(text: str) -> int:
        return len(text)

    assert len(exact_role(0, 100, characters)) == 100


def test_a_task_puts_the_nonce_first_and_every_output_in_order() -> None:
    text = task(2, "7000001 is the number of this job.", ["first text", "second text"])
    assert text.startswith("7000001 is the number of this job.\n\n")
    assert text.index("first text") < text.index("second text") < text.index("your turn")
