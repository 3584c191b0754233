"""Installs every real client into an environment of its own, once: `make test-clients`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from relaykv.engine.model_store import cache_home

RECIPES = Path(__file__).parent / "environments"
# The smallest first, so that a slow network still gives most of them.
NAMES = (
    "openai-python",
    "litellm",
    "pydantic-ai",
    "openai-agents",
    "langgraph",
    "autogen",
    "crewai",
    "node",
)
_STAMP = "installed"  # an installation that was broken off has none


@dataclass(frozen=True, slots=True)
class Environment:
    """Where one client is installed. The folder's name changes with what is installed in it."""

    name: str
    folder: Path

    @property
    def is_installed(self) -> bool:
        return (self.folder / _STAMP).exists()

    @property
    def python(self) -> Path:
        """The interpreter of a Python client."""
        return self.folder / "bin" / "python"


def environment(name: str) -> Environment:
    """The environment of a client in `NAMES`, installed or not."""
    recipe = _recipe(name)
    # A virtual environment also depends on the interpreter it was made with.
    version = b"" if name == "node" else f"{sys.version_info[:2]}".encode()
    digest = hashlib.sha256(recipe.read_bytes() + version).hexdigest()[:12]
    return Environment(name, cache_home() / "clients" / f"{name}-{digest}")


def install(name: str) -> None:
    """Installs a client unless it is there.

    Raises:
        subprocess.CalledProcessError: an installer failed; what it said is on stderr.
        FileNotFoundError: there is no npm.
    """
    target = environment(name)
    if target.is_installed:
        return
    shutil.rmtree(target.folder, ignore_errors=True)
    target.folder.mkdir(parents=True)
    if name == "node":
        shutil.copy(_recipe(name), target.folder)
        _run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"], target.folder)
    else:
        _install_python(target, _recipe(name))
    (target.folder / _STAMP).touch()


def _install_python(target: Environment, recipe: Path) -> None:
    if uv := shutil.which("uv"):
        _run([uv, "venv", "--python", sys.executable, str(target.folder)])
        _run([uv, "pip", "install", "--python", str(target.python), "-r", str(recipe)])
        return
    _run([sys.executable, "-m", "venv", str(target.folder)])
    pip = [str(target.python), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", "-r", str(recipe)])


def _recipe(name: str) -> Path:
    return RECIPES / ("node/package.json" if name == "node" else f"{name}.txt")


def _run(command: list[str], folder: Path | None = None) -> None:
    subprocess.run(command, cwd=folder, check=True)


def main(names: list[str]) -> int:
    """Installs the named clients, or all; returns 1 when one could not be installed.

    `--missing` installs nothing: it prints the clients that are not installed, and returns 1 if
    there are any.
    """
    if names == ["--missing"]:
        missing = [name for name in NAMES if not environment(name).is_installed]
        print(" ".join(missing))
        return 1 if missing else 0
    failed = []
    for name in names or NAMES:
        print(f"{name}: {environment(name).folder}", flush=True)
        try:
            install(name)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
