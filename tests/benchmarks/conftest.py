"""Benchmarks are scripts, not a package: their folder is put on the path as when they run.

So is tests/clients, whose fake server the benchmarks' tests share.
"""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]

for _folder in ("benchmarks", "tests/clients"):
    sys.path.insert(0, str(_ROOT / _folder))
