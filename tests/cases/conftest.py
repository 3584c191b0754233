"""An application around a fake engine, as in tests/server, whose helpers are shared.

So are those of tests/engine, which the real engine around a tiny model is built with.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]

for _folder in ("server", "engine"):
    sys.path.insert(0, str(_TESTS / _folder))

from app_client import AppClient  # noqa: E402
from fake_engine import FakeEngine, fake_state  # noqa: E402

from relaykv.server.app import create_app  # noqa: E402


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[AppClient]:
    state = fake_state(engine)
    yield AppClient(create_app(state))
    state.close()
