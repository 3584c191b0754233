"""Leaves the real clients out of every run that does not ask for them: they must be installed."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects them unless the `-m` expression speaks of `clients`."""
    if "clients" in config.option.markexpr:
        return
    wanted = [item for item in items if item.get_closest_marker("clients") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted
