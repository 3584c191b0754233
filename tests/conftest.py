"""Fixtures that several folders of tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from relaykv.engine.model_store import pull_default_model


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model's folder, fetched and converted when it is missing."""
    return pull_default_model()
