"""The demo against a fake server: its table, its exit codes, and that it leaves no process."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_server import FakeServer

from relaykv.clients import demo
from relaykv.clients.demo_agents import AGENTS
from relaykv.clients.streamed_answer import PromptTokens, StreamedAnswer

FAKE_COMMAND = (sys.executable, str(Path(__file__).with_name("fake_server.py")))


@pytest.fixture
def pid_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "pid"
    monkeypatch.setenv("FAKE_SERVER_PID", str(path))
    return path


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        threading.Thread(target=fake.serve_forever, daemon=True).start()
        yield fake
        fake.shutdown()


def is_running(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.read_text()), 0)
    except ProcessLookupError:
        return False
    return True


def answer(first_token_s: float, prompt: PromptTokens, reason: str | None = None) -> StreamedAnswer:
    return StreamedAnswer("text", 5, first_token_s, 1.0, prompt, reason)


def test_the_demo_starts_a_server_shows_its_news_and_stops_it(
    pid_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--max-tokens", "40"], FAKE_COMMAND) == 0
    out = capsys.readouterr().out
    assert "downloading default" in out
    assert "a line about something else" not in out
    assert "Warming up" in out
    assert not is_running(pid_file)


def test_the_table_shows_what_the_server_said_about_every_prompt(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--url", f"{server.url}/v1/", "--max-tokens", "40"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if re.search(r"with(out)? session +\d", line)]
    numbers = [[int(cell) for cell in row if cell.isdigit()] for row in rows]
    assert len(numbers) == 6
    for total, *kinds in numbers:
        assert sum(kinds) == total
    roles = [len(agent.role.split()) + 1 for agent in AGENTS]
    assert [row[1] for row in numbers] == [role for role in roles for _ in range(2)]
    relayed_and_recomputed = [row[2:4] for row in numbers]
    assert relayed_and_recomputed == [[0, 0], [0, 0], [0, 0], [30, 10], [0, 0], [60, 20]]
    assert all(len(line) <= 110 for line in out.splitlines())
    assert "took 80 over" in " ".join(out.split())


def test_every_agent_reads_what_its_own_run_wrote(server: FakeServer) -> None:
    assert demo.main(["--url", server.url, "--max-tokens", "3", "--policy", "epic"]) == 0
    warm, plain, relayed = (server.requests[start : start + 3] for start in (0, 3, 6))
    assert all("relay_session" not in body for body in [*warm, *plain])
    assert len({body["relay_session"] for body in relayed}) == 1
    assert all(body["relay"] == {"policy": "epic"} for body in relayed)
    assert all(body["temperature"] == 0 for body in server.requests)
    for start, run in ((4, plain), (7, relayed)):
        editor_reads = run[2]["messages"][-1]["content"]
        assert f"answer{start}word0 answer{start}word1" in editor_reads
        assert f"answer{start + 1}word0 answer{start + 1}word1" in editor_reads
        assert "{output" not in editor_reads
    heads = {body["messages"][-1]["content"].split("\n")[0] for body in plain + relayed}
    assert len(heads) == 2  # the two runs share no prefix behind the role prompts


def test_role_prompts_differ_and_tasks_name_only_earlier_outputs() -> None:
    assert len({agent.role for agent in AGENTS}) == len(AGENTS)
    for index, agent in enumerate(AGENTS):
        assert agent.task_with(["one {output_2}", "two"][:index]).count("{output_1}") == 0
    assert "one {output_2}" in AGENTS[2].task_with(["one {output_2}", "two"])


def test_speed_up_is_the_ratio_of_the_times_to_the_first_token() -> None:
    plain = [answer(0.5, PromptTokens(100, 60, 0, 0, 40))] * 3
    relayed = [answer(0.2, PromptTokens(100, 60, 20, 10, 10, 0.3))] * 3
    table = demo.format_table(plain, relayed).splitlines()
    assert table[3].split()[-1] == "x"
    assert "2.50 x" in table[3]
    assert "0.500 s" in table[2]
    meaning = demo.format_meaning(plain, relayed)
    assert "2.5 times as fast" in meaning
    assert "took 30 over" in meaning
    assert "repaired 10" in meaning


def test_the_last_line_says_when_nothing_was_relayed_or_gained() -> None:
    exact = PromptTokens(100, 60, 0, 0, 40)
    plain = [answer(0.5, exact)] * 3
    refused = [answer(0.5, exact, "nothing matched")] * 3
    assert "Nothing was relayed to the editor (nothing matched)" in demo.format_meaning(
        plain, refused
    )
    slower = [answer(0.6, PromptTokens(100, 60, 20, 10, 10))] * 3
    assert "no faster" in demo.format_meaning(plain, slower)


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("fails", "the checksum is wrong"),
        ("never ready", "was not ready after 1 s"),
        ("refuses", "sessions are refused here"),
        ("dies", "out of blocks, out of luck"),
        ("cuts off", "ended in the middle of an answer"),
    ],
)
def test_a_failing_server_gives_exit_code_1_a_message_and_no_process(
    behaviour: str,
    message: str,
    pid_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAKE_SERVER", behaviour)
    timeout = ["--ready-timeout", "1"] if behaviour == "never ready" else []
    assert demo.main(["--max-tokens", "4", *timeout], FAKE_COMMAND) == 1
    assert message in capsys.readouterr().err
    assert not is_running(pid_file)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_stops_its_server(
    signum: signal.Signals,
    pid_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAKE_SERVER", "never ready")

    def interrupt() -> None:
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signum)

    threading.Thread(target=interrupt, daemon=True).start()
    assert demo.main(["--ready-timeout", "60"], FAKE_COMMAND) == 1
    assert "interrupted" in capsys.readouterr().err
    assert not is_running(pid_file)


def test_a_missing_command_and_a_silent_address_are_told_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert demo.main([], ["/nowhere/relaykv"]) == 1
    assert "cannot start the server" in capsys.readouterr().err
    assert demo.main(["--url", "http://127.0.0.1:9"]) == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
