"""An application around a fake engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from app_client import AppClient
from fake_engine import FakeEngine, fake_state

from relaykv.server.app import create_app


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[AppClient]:
    state = fake_state(engine)
    yield AppClient(create_app(state))
    state.close()
