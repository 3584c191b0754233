"""The shape of the code: who may import whom, how big things get, what the wheel carries.

Imports are read with `ast`, also those inside functions, so nothing has to be imported here.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("server", "engine", "kernels", "clients")

# Every module of the engine is in exactly one ring. Pure: values and decisions, no torch.
# Device: works on tensors. Assembly: builds both and runs them.
PURE = {
    "admission",
    "anchor_gate",
    "anchor_pools",
    "answer",
    "band_search",
    "batch",
    "block_pool",
    "bootstrap",
    "chain",
    "chain_report",
    "choice_report",
    "choice_trial",
    "client",
    "config",
    "detokenizer",
    "drift_plot",
    "fidelity_report",
    "fidelity_scores",
    "frontier_plot",
    "grammar",
    "handoff",
    "handoff_slots",
    "layer_curves",
    "model_store",
    "models.families",
    "options",
    "policy",
    "policy_name",
    "prefill_plan",
    "prefix_cache",
    "profile_plot",
    "provenance",
    "recompute",
    "recording",
    "relay_profile",
    "relay_report",
    "request",
    "request_state",
    "scheduler",
    "segment",
    "shadow",
    "segment_choice",
    "segment_index",
    "tokenizer",
}
DEVICE = {
    "anchor_offsets",
    "decode_graphs",
    "device",
    "divergence",
    "forced_pass",
    "forward_batch",
    "forward_pass",
    "kv_cache",
    "kv_comparison",
    "loader",
    "logit_changes",
    "logprobs",
    "memory",
    "model_runner",
    "offset_memory",
    "models.decoder",
    "models.fingerprint",
    "models.layers",
    "penalties",
    "relay",
    "row_phases",
    "row_subset",
    "sampler",
    "sizing",
}
ASSEMBLY = {
    "assembly",
    "async_engine",
    "chain_fidelity",
    "choice_fidelity",
    "core",
    "handoff_lessons",
    "fidelity",
    "policy_reader",
    "producers",
    "profiler",
    "shadow_runs",
}

# The command line: what may import the assembled engine, inside a function only.
COMMANDS = {"cli", "fidelity_run", "profile_command"}

# What may never be imported, not even inside a function.
FORBIDDEN = {
    "server": ("torch", "triton", "flashinfer", "relaykv.kernels", "relaykv.clients"),
    "engine": ("relaykv.server", "relaykv.clients", "fastapi", "starlette", "pydantic", "uvicorn"),
    "kernels": ("relaykv.server", "relaykv.engine", "relaykv.clients"),
    "clients": ("relaykv.server", "relaykv.engine", "relaykv.kernels"),
}
# What the pure ring may import inside a function only.
HEAVY = ("torch", "transformers", "safetensors", "accelerate", "gguf")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
# Written in pieces, so that this file passes its own test.
FOREIGN_TEXT = (
    *(f"/{folder}/" for folder in ("root", "work", "opt", "home")),
    *(f"{host}.org" for host in ("pypi", "pythonhosted", "deb.debian")),
)


@dataclass(frozen=True)
class Import:
    """One imported name with its module in front, and where it stands."""

    name: str
    line: int
    in_function: bool

    def is_of(self, *packages: str) -> bool:
        return any(f"{self.name}.".startswith(f"{package}.") for package in packages)


class Module:
    """One Python file of the four folders."""

    def __init__(self, path: Path) -> None:
        self.path = path.relative_to(ROOT)
        self.folder = self.path.parts[0]
        self.name = ".".join(self.path.with_suffix("").parts[1:])
        self.source = path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self.tree, False))


def _imports(node: ast.AST, in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, in_function)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:  # `from relaykv import engine` counts as relaykv.engine
                yield Import(f"{child.module}.{alias.name}", child.lineno, in_function)
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _imports(child, in_function or is_function)


def _python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


MODULES = [Module(path) for path in _python_files(*FOLDERS)]
ENGINE = [module for module in MODULES if module.folder == "engine"]


def _fail_if(wrong: list[str]) -> None:
    assert not wrong, "\n" + "\n".join(wrong)


def _ring_packages(ring: set[str]) -> tuple[str, ...]:
    return tuple(f"relaykv.engine.{name}" for name in sorted(ring))


def _wrong_imports(modules: list[Module], packages: tuple[str, ...], why: str) -> list[str]:
    return [
        f"{module.path}:{found.line} imports {found.name}: {why}"
        for module in modules
        for found in module.imports
        if found.is_of(*packages)
    ]


def test_every_folder_has_modules() -> None:
    assert {module.folder for module in MODULES} == set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_folder_imports_what_stands_above_it(folder: str) -> None:
    modules = [module for module in MODULES if module.folder == folder]
    _fail_if(_wrong_imports(modules, FORBIDDEN[folder], f"{folder} may not"))


def test_every_engine_module_is_in_exactly_one_ring() -> None:
    rings = [*PURE, *DEVICE, *ASSEMBLY]
    names = {module.name for module in ENGINE}
    twice = sorted(name for name in set(rings) if rings.count(name) > 1)
    _fail_if(
        [f"engine/{name} is in no ring: add it to PURE, DEVICE or ASSEMBLY here" for name in
         sorted(names - set(rings))]
        + [f"engine/{name} is in a ring but does not exist" for name in sorted(set(rings) - names)]
        + [f"engine/{name} is in two rings" for name in twice]
    )  # fmt: skip


def test_no_ring_imports_a_ring_around_it() -> None:
    pure = [module for module in ENGINE if module.name in PURE]
    device = [module for module in ENGINE if module.name in DEVICE]
    outside_pure = (*_ring_packages(DEVICE | ASSEMBLY), "relaykv.kernels")
    wrong = _wrong_imports(pure, outside_pure, "the pure ring knows no tensors")
    wrong += _wrong_imports(device, _ring_packages(ASSEMBLY), "only assembly builds the rings")
    _fail_if(wrong)


def test_the_pure_ring_loads_without_torch() -> None:
    _fail_if(
        [
            f"{module.path}:{found.line} imports {found.name} when it is loaded"
            for module in ENGINE
            if module.name in PURE
            for found in module.imports
            if found.is_of(*HEAVY) and not found.in_function
        ]
    )


def test_the_server_knows_only_the_pure_ring_and_its_command_line_loads_the_rest_late() -> None:
    pure = _ring_packages(PURE)
    _fail_if(
        [
            f"{module.path}:{found.line} imports {found.name}"
            for module in MODULES
            if module.folder == "server"
            for found in module.imports
            if found.is_of("relaykv.engine")
            and not found.is_of(*pure)
            and not (module.name in COMMANDS and found.in_function)
        ]
    )


def test_imports_are_absolute_and_nothing_is_imported_with_a_star() -> None:
    _fail_if(
        [
            f"{module.path}:{node.lineno} has a relative or star import"
            for module in MODULES
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ImportFrom)
            and (node.level or any(alias.name == "*" for alias in node.names))
        ]
    )


def test_no_file_and_no_function_is_too_long() -> None:
    wrong = []
    for path in _python_files(*FOLDERS, "tests", "benchmarks"):
        source = path.read_text(encoding="utf-8")
        num_lines = len(source.splitlines())
        if num_lines > MAX_FILE_LINES:
            wrong.append(f"{path.relative_to(ROOT)} has {num_lines} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    wrong.append(f"{where} {node.name} has {length} lines")
    _fail_if(wrong)


def test_every_folder_with_python_files_is_a_package_of_the_distribution() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    setuptools = pyproject["tool"]["setuptools"]
    folders = {module.path.parent.as_posix() for module in MODULES}
    expected = {"relaykv." + folder.replace("/", "."): folder for folder in folders}
    assert set(setuptools["packages"]) == set(expected)
    assert setuptools["package-dir"] == expected


def test_the_four_folders_have_no_init_file() -> None:
    # A checkout's kernels/__init__.py would shadow the distribution of that name.
    _fail_if([str(path.path) for path in MODULES if path.path.name == "__init__.py"])


def test_the_wheel_carries_every_module_and_profile(tmp_path: Path) -> None:
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    program = "from setuptools import build_meta; build_meta.build_wheel('out')"
    command = [sys.executable, "-c", program]
    built = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = (copy / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        carried = {name for name in archive.namelist() if ".dist-info/" not in name}
        infos = {name.partition(".dist-info/")[2] for name in archive.namelist()}
    profiles = sorted((ROOT / "engine" / "profiles").glob("*.json*"))  # and the hand-offs
    files = [*_python_files(*FOLDERS), *profiles]
    assert profiles
    assert carried == {f"relaykv/{path.relative_to(ROOT).as_posix()}" for path in files}
    assert {"METADATA", "entry_points.txt", "licenses/LICENSE"} <= infos


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_readme_of_a_folder_names_its_files_and_no_others(folder: str) -> None:
    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\* `([^`]+\.(?:py|json))`", text, re.MULTILINE))
    paths = [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.json")]
    assert named == {path.relative_to(ROOT / folder).as_posix() for path in paths}
    assert "may not be in here" in text


def test_no_text_names_a_path_or_a_package_host_of_the_machine_it_was_written_on() -> None:
    wrong = []
    for path in _text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            wrong += [
                f"{path.relative_to(ROOT)}:{number} holds {text}"
                for text in (*FOREIGN_TEXT, f"{ROOT}/")
                if text in line
            ]
    _fail_if(wrong)


def _text_files() -> list[Path]:
    suffixes = {".py", ".md", ".toml", ".txt", ".json", ".yml", ".yaml", ".sh", ""}
    folders = (*FOLDERS, "tests", "benchmarks", "docs", "examples", "deploy", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    paths += [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    return sorted(
        path
        for path in paths
        if path.is_file() and path.suffix in suffixes and "out" not in path.parts
    )


def test_no_two_modules_of_tests_and_benchmarks_share_a_name() -> None:
    # They are imported by their bare names; conftest is the exception that pytest makes.
    paths = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    names = [path.stem for path in paths if path.stem != "conftest"]
    assert not sorted({name for name in names if names.count(name) > 1})
