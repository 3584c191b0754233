"""The examples that need nothing but what a development environment has, as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relaykv.clients.server_process import running_server

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 300
MAX_LINES = 60  # an example that is longer is no longer one

RELAYED = re.compile(r"Relayed: (\d+) tokens left as they were, (\d+) repaired")


@pytest.fixture(scope="module")
def server(default_model_dir: Path) -> Iterator[str]:
    assert default_model_dir.is_dir()
    with running_server(None) as root:
        yield root


def run(command: list[str], url: str, folder: Path) -> str:
    """Runs an example in `folder`; returns what it printed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "RELAYKV_URL": url, "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.model
@pytest.mark.parametrize("name", ["curl.sh", "plain_http.py"])
def test_the_reviewer_is_relayed_what_the_writer_wrote(
    name: str, server: str, tmp_path: Path
) -> None:
    program = str(EXAMPLES / name)
    command = ["bash", program] if name.endswith(".sh") else [sys.executable, program]
    printed = run(command, server, tmp_path)
    match = RELAYED.search(printed)
    assert match, printed
    # The writer wrote 80 tokens, or fewer when it found an end.
    assert int(match[1]) + int(match[2]) >= 48, printed


@pytest.mark.model
def test_curl_stops_with_the_servers_reason(server: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="error: 404"):
        run(["bash", str(EXAMPLES / "curl.sh")], f"{server}/nowhere", tmp_path)


def test_examples_are_short_and_listed_and_take_the_address_from_the_environment() -> None:
    listing = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    programs = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh"))
    assert len(programs) == 8
    for program in programs:
        text = program.read_text(encoding="utf-8")
        assert len(text.splitlines()) < MAX_LINES, program
        assert "RELAYKV_URL" in text
        assert "Relayed: " in text
        assert f"`{program.name}`" in listing
