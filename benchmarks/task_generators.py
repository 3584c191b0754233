"""Lets the generators of reasoning-gym make tasks, which it prints as JSON Lines.

`task_data.py` runs this in a process of its own, on a downloaded wheel that is not installed:

    python benchmarks/task_generators.py WHEEL gsm_symbolic --seed 0 --count 10
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class _Generator:
    """A module of reasoning-gym, of the name that the generator has."""

    package: str
    data_set: str  # classes in it
    config: str
    settings: Mapping[str, int]  # other than the defaults


_GENERATORS = {
    "gsm_symbolic": _Generator(
        "reasoning_gym.arithmetic.gsm_symbolic",
        "GSMSymbolicDataset",
        "GSMSymbolicDatasetConfig",
        {},
    ),
    "needle_haystack": _Generator(
        "reasoning_gym.cognition",
        "NeedleHaystackDataset",
        "NeedleHaystackConfig",
        {"min_num_statements": 20, "max_num_statements": 45},
    ),
}


def import_generator(wheel: Path, name: str) -> ModuleType:
    """The generator's module, without what its packages' own `__init__` would import.

    Those import every generator of the package, and with them eleven other distributions that
    these two do not use.
    """
    package = _GENERATORS[name].package
    parts = package.split(".")
    sys.path.insert(0, str(wheel))
    for depth in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:depth]))
        module.__path__ = ["/".join([str(wheel), *parts[:depth]])]
        sys.modules[module.__name__] = module
    import_module(f"{parts[0]}.coaching")  # it and `factory` import each other: this order works
    return import_module(f"{package}.{name}")


def generate(wheel: Path, name: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Tasks with `question`, `answer` and `metadata`; the same ones for the same seed."""
    module = import_generator(wheel, name)
    generator = _GENERATORS[name]
    config = getattr(module, generator.config)(seed=seed, size=count, **generator.settings)
    tasks = getattr(module, generator.data_set)(config)
    return [tasks[index] for index in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("generator", choices=_GENERATORS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    arguments = parser.parse_args()
    for task in generate(arguments.wheel, arguments.generator, arguments.seed, arguments.count):
        print(json.dumps(task, default=str))  # metadata may hold fractions
    return 0


if __name__ == "__main__":
    sys.exit(main())
