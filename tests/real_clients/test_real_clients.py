"""Agent programs of real clients, each as it is installed, against the server and its model.

`make test-clients` installs the clients and runs this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from install_clients import Environment, environment
from recording_proxy import RecordingProxy, recording_proxy

from relaykv.clients.server_process import running_server

pytestmark = [pytest.mark.clients, pytest.mark.model]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PROGRAMS = Path(__file__).parent / "programs"
PROGRAM_TIMEOUT_S = 300
MIN_RELAYED_SHARE = 0.6  # of the first agent's output, in the second agent's prompt


@dataclass(frozen=True, slots=True)
class Case:
    """A program, the environment that it runs in, and how many agents it has."""

    client: str
    program: Path
    num_requests: int = 2


CASES = (
    Case("openai-python", EXAMPLES / "openai_chain.py", 3),
    Case("litellm", PROGRAMS / "litellm_completion.py"),
    Case("pydantic-ai", PROGRAMS / "pydantic_ai_agents.py"),
    Case("openai-agents", EXAMPLES / "agents_sdk.py"),
    Case("openai-agents", PROGRAMS / "agents_responses.py"),
    Case("langgraph", EXAMPLES / "langgraph_fstring.py", 3),
    Case("langgraph", EXAMPLES / "langgraph_messages.py", 3),
    Case("langgraph", PROGRAMS / "langchain_agents.py"),
    Case("autogen", EXAMPLES / "autogen_chat.py"),
    Case("crewai", EXAMPLES / "crewai_crew.py"),
    Case("crewai", PROGRAMS / "crewai_helper.py"),
    Case("node", PROGRAMS / "openai_node.mjs"),
    Case("node", PROGRAMS / "vercel_ai.mjs"),
)


@pytest.fixture(scope="module")
def server(default_model_dir: Path) -> Iterator[str]:
    assert default_model_dir.is_dir()
    with running_server(None) as root:
        yield root


@pytest.fixture
def proxy(server: str) -> Iterator[RecordingProxy]:
    with recording_proxy(server) as proxy:
        yield proxy


@pytest.mark.timeout(PROGRAM_TIMEOUT_S + 60)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.client}-{case.program.stem}")
def test_the_second_agent_is_relayed_what_the_first_one_wrote(
    case: Case, proxy: RecordingProxy, tmp_path: Path
) -> None:
    printed = run_program(case, proxy.url, tmp_path)
    exchanges = proxy.exchanges()
    assert [exchange.status for exchange in exchanges] == [200] * case.num_requests
    first, second = exchanges[:2]
    num_relayed, num_output_tokens = second.num_relayed_from(first), len(first.output)
    print(f"{case.program.name}: {num_relayed} of {num_output_tokens} tokens relayed")
    assert num_relayed > MIN_RELAYED_SHARE * num_output_tokens, printed
    if case.program.parent == EXAMPLES:
        assert "Relayed: " in printed


def run_program(case: Case, url: str, folder: Path) -> str:
    """Runs a program in `folder`, which is also its home; returns what it printed."""
    installed = environment(case.client)
    assert installed.is_installed, f"{case.client} is not installed: run `make test-clients`"
    done = subprocess.run(
        _command(case, installed, folder),
        cwd=folder,
        env=_environ(url, folder),
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def _command(case: Case, installed: Environment, folder: Path) -> list[str]:
    if case.client != "node":
        # What the environment lacks of ours is found in this folder, under its own name.
        (folder / "relaykv").mkdir()
        (folder / "relaykv" / "clients").symlink_to(ROOT / "clients")
        return [str(installed.python), str(case.program)]
    # Node looks for packages beside the program.
    (folder / "node_modules").symlink_to(installed.folder / "node_modules")
    return ["node", str(shutil.copy(case.program, folder))]


def _environ(url: str, folder: Path) -> dict[str, str]:
    """The environment variables of a program: nothing of the user's that could change it."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    return {
        **kept,
        "HOME": str(folder),
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "RELAYKV_URL": url,
        "NO_PROXY": "127.0.0.1",
        # Nothing is to be asked of the network.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OTEL_SDK_DISABLED": "true",
    }
