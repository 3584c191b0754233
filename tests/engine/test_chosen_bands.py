"""Which bands an engine starts with, and what it says about them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from planted_model import Reading, planted_model, planted_parts

from relaykv.engine.assembly import choose_relay_bands
from relaykv.engine.options import EngineOptions
from relaykv.engine.policy import Bands
from relaykv.engine.relay_profile import BandsSource, ChosenBands


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAYKV_HOME", str(tmp_path / "home"))


def test_a_model_without_a_profile_is_named_in_the_log_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        chosen = choose_relay_bands(EngineOptions(), 16, "f" * 16)

    assert (chosen.bands, chosen.source) == (Bands(0, 2, 15), BandsSource.DEFAULT)
    (record,) = caplog.records
    assert "f" * 16 in record.getMessage()
    assert "safe bands inject 0, select 2, stop 15" in record.getMessage()


def test_a_profile_for_another_model_is_used_with_a_warning_and_the_right_one_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "p.json"
    content = {"model": "m", "fingerprint": "other", "inject": 1, "select": 2, "stop": 3}
    path.write_text(json.dumps(content), encoding="utf-8")
    options = EngineOptions(profile=str(path))

    with caplog.at_level(logging.WARNING):
        assert choose_relay_bands(options, 4, "other").bands == Bands(1, 2, 3)
        assert not caplog.records
        assert choose_relay_bands(options, 4, "this").source is BandsSource.GIVEN
    (record,) = caplog.records
    assert "was made for another model" in record.getMessage()


def test_the_parts_of_an_engine_tell_their_bands_and_the_models_fingerprint() -> None:
    parts = planted_parts(planted_model([Reading(0.0)] * 3, None))

    assert parts.relay_bands == ChosenBands(Bands(0, 1, 2), BandsSource.GIVEN, "planted")
