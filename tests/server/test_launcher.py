"""The server process: alive before its model is loaded, clean when it is stopped."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

PROGRAM = textwrap.dedent(
    """
    import sys, time
    sys.path.insert(0, {folder!r})
    from fake_engine import fake_state
    from relaykv.server.launcher import ListenOptions, LoadedModel, run_server
    from relaykv.server.settings import ServerSettings

    def load():
        time.sleep({delay_s})
        if {fails}:
            raise ValueError("the file is broken")
        return LoadedModel(fake_state().backend(), lambda: print("closed", flush=True))

    options = ListenOptions("127.0.0.1", {port}, "warning")
    sys.exit(run_server(load, ServerSettings(), options))
    """
)


@contextmanager
def server_process(
    delay_s: float = 0.0, fails: bool = False, port: int = 0
) -> Iterator[subprocess.Popen[str]]:
    folder = str(Path(__file__).parent)
    program = PROGRAM.format(folder=folder, delay_s=delay_s, fails=fails, port=port)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    match = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
    assert match is not None
    return match[0]


def wait_for_status(url: str, status: int) -> httpx.Response:
    deadline = time.monotonic() + 10
    while True:
        try:
            response = httpx.get(url)
            if response.status_code == status:
                return response
        except httpx.ConnectError:
            pass
        assert time.monotonic() < deadline, f"{url} never answered {status}"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_ready_server_cleanly(number: signal.Signals) -> None:
    with server_process() as process:
        url = url_of(process)
        wait_for_status(f"{url}/ready", 200)
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
        assert process.returncode == 0, err
        assert f"RelayKV is ready at {url}/v1 (model org/tiny, loaded in" in out
        assert out.endswith("closed\n")
        assert "Traceback" not in err


def test_a_server_answers_and_stops_while_it_loads() -> None:
    with server_process(delay_s=30) as process:
        url = url_of(process)
        wait_for_status(f"{url}/health", 200)
        response = httpx.get(f"{url}/ready")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "model_loading"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=10)
        assert process.returncode == 0, err


def test_a_model_that_does_not_load_is_one_line_and_exit_code_one() -> None:
    with server_process(fails=True) as process:
        _, err = process.communicate(timeout=10)
        assert process.returncode == 1
        assert err == "relaykv: error: cannot load the model: the file is broken\n"


def test_a_taken_port_is_one_line_and_exit_code_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with server_process(port=port) as process:
            _, err = process.communicate(timeout=10)
            assert process.returncode == 1
            assert err.startswith(f"relaykv: error: cannot listen on 127.0.0.1 port {port}: ")
            assert err.count("\n") == 1
