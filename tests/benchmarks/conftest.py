"""Benchmarks are scripts, not a package: their folder is put on the path as when they run.

So are tests/clients, whose fake server the benchmarks' tests share, and tests/engine, whose tiny
models.
"""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]

for _folder in ("benchmarks", "tests/clients", "tests/engine"):
    sys.path.insert(0, str(_ROOT / _folder))
