"""The README's commands work as written, on a real server with the default model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from relaykv.clients.server_process import running_server

README = Path(__file__).parents[2] / "README.md"
TESTED_BLOCK = re.compile(r"^<!-- tested -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# curl says nothing of an HTTP error by its exit code, unless it is told to.
STRICT = 'set -euo pipefail\ncurl() { command curl --fail-with-body "$@"; }\n'
BLOCK_TIMEOUT_S = 300

pytestmark = pytest.mark.model


def readme_blocks() -> list[tuple[str, str]]:
    """Language and text of the README's blocks that stand behind the mark, in order."""
    return TESTED_BLOCK.findall(README.read_text(encoding="utf-8"))


def run_block(language: str, text: str, root: str, folder: Path) -> str:
    """Runs a block in `folder` against the server at `root`; returns what it printed."""
    text = text.replace("http://127.0.0.1:8000", root)
    commands = {"bash": ["bash", "-c", STRICT + text], "python": [sys.executable, "-c", text]}
    # The virtual environment need not be active.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        commands[language],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=BLOCK_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def printed(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What all blocks print one after the other, each under its first line."""
    assert default_model_dir.is_dir()
    folder = tmp_path_factory.mktemp("readme")
    with running_server(None) as root:
        outputs = [run_block(*block, root, folder) for block in readme_blocks()]
    return "\n".join(outputs)


def test_every_block_that_calls_the_server_is_tested() -> None:
    text = README.read_text(encoding="utf-8")
    fences = re.findall(r"^```(?:bash|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [block for _, block in readme_blocks()] == fences
    assert len(fences) >= 6


def test_chats_are_answered_plain_and_streamed(printed: str) -> None:
    assert '"object":"chat.completion"' in printed
    assert "data: [DONE]" in printed


def test_the_reviewer_is_relayed_what_the_writer_wrote(printed: str) -> None:
    start = printed.index("\n{\n") + 1  # the one answer that json.tool has indented
    answer, _ = json.JSONDecoder().raw_decode(printed[start:])
    tokens = answer["relay"]["tokens"]
    assert answer["relay"]["reason"] is None
    assert answer["relay"]["session"] == "lamp"
    assert tokens["relayed"] >= 32
    assert sum(tokens.values()) == answer["usage"]["prompt_tokens"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == tokens["prefix"] + tokens["relayed"]


def test_the_python_example_relays_too(printed: str) -> None:
    first, second = re.findall(r"'relayed': (\d+)", printed)
    assert int(first) == 0
    assert int(second) >= 32


def test_the_session_is_listed_and_dropped(printed: str) -> None:
    assert '"object":"relay.session"' in printed
    assert '"deleted":true' in printed
