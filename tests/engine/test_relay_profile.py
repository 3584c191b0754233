from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from relaykv.engine.band_search import BandShares
from relaykv.engine.layer_curves import LayerCurves
from relaykv.engine.policy import Bands
from relaykv.engine.relay_profile import (
    BandsSource,
    ChosenBands,
    ProfileError,
    ProfileReport,
    RelayProfile,
    choose_bands,
    default_bands,
    own_profile_path,
    read_profile,
    write_profile,
)

GOOD = {"model": "m", "fingerprint": "f", "inject": 1, "select": 3, "stop": 7}


def write(folder: Path, content: object) -> Path:
    path = folder / "profile.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_profile_gives_the_bands_of_its_model(tmp_path: Path) -> None:
    profile = read_profile(write(tmp_path, GOOD), num_layers=8)

    assert (profile.model, profile.fingerprint, profile.bands) == ("m", "f", Bands(1, 3, 7))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({**GOOD, "stop": 8}, "stop 8 is past the model's last layer 7"),
        ({**GOOD, "inject": 4}, "bands must rise"),
        ({**GOOD, "inject": -1}, "bands must rise"),
        ({**GOOD, "select": "deep"}, "deep"),
        ({**GOOD, "select": None}, "cannot use profile"),
        ({k: v for k, v in GOOD.items() if k != "select"}, "select"),
        ([1, 2], "cannot use profile"),
        (None, "cannot use profile"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused_with_its_path_and_the_reason(
    tmp_path: Path, content: object, reason: str
) -> None:
    path = write(tmp_path, content)

    with pytest.raises(ProfileError, match=reason) as caught:
        read_profile(path, num_layers=8)

    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_broken_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot use profile"):
        read_profile(tmp_path / "none.json", num_layers=8)
    path = tmp_path / "broken.json"
    path.write_bytes(b"{\xff")
    with pytest.raises(ProfileError, match="cannot use profile"):
        read_profile(path, num_layers=8)


DEFAULT_MODEL = "e3ee661728a74ccc"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of everything that is cached."""
    monkeypatch.setenv("RELAYKV_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def report(fingerprint: str, bands: Bands) -> ProfileReport:
    curve = np.linspace(1.0, 0.9, 30)
    return ProfileReport(
        profile=RelayProfile("m", fingerprint, bands),
        dtype="float32",
        command="relaykv profile",
        num_handoffs=24,
        num_tokens=3000,
        shares=BandShares(1.0, 0.5, 0.75),
        curves=LayerCurves(curve, curve, curve),
    )


@pytest.mark.usefixtures("home")
def test_the_default_model_has_a_shipped_profile() -> None:
    chosen = choose_bands(None, DEFAULT_MODEL, num_layers=30)

    assert chosen.source is BandsSource.SHIPPED
    assert chosen.path is not None
    assert chosen.path.name == "SmolLM2-135M-Instruct.json"
    assert (chosen.fingerprint, chosen.made_for) == (DEFAULT_MODEL, DEFAULT_MODEL)
    assert chosen.bands.stop == 29


@pytest.mark.usefixtures("home")
def test_a_model_without_a_profile_gets_the_safe_bands() -> None:
    chosen = choose_bands(None, "0" * 16, num_layers=30)

    assert chosen == ChosenBands(Bands(0, 3, 29), BandsSource.DEFAULT, "0" * 16)


def test_a_written_profile_is_found_before_the_shipped_one_and_a_given_one_before_both(
    home: Path, tmp_path: Path
) -> None:
    path = own_profile_path(DEFAULT_MODEL)
    write_profile(report(DEFAULT_MODEL, Bands(1, 5, 20)), path)
    given = write(tmp_path, GOOD)

    assert path == home / "profiles" / f"{DEFAULT_MODEL}.json"
    own = choose_bands(None, DEFAULT_MODEL, num_layers=30)
    assert (own.bands, own.source, own.path) == (Bands(1, 5, 20), BandsSource.OWN, path)
    chosen = choose_bands(given, DEFAULT_MODEL, num_layers=30)
    assert (chosen.bands, chosen.source, chosen.path) == (Bands(1, 3, 7), BandsSource.GIVEN, given)
    assert chosen.made_for == "f"


def test_a_written_profile_tells_what_it_was_made_from_and_is_the_same_every_time(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "a" / "p.json", tmp_path / "b" / "p.json"
    write_profile(report("f", Bands(1, 5, 20)), first)
    write_profile(report("f", Bands(1, 5, 20)), second)

    content = json.loads(first.read_text(encoding="utf-8"))
    assert content["num_handoffs"] == 24
    assert content["share_of_draws"] == {"inject": 1.0, "select": 0.5, "stop": 0.75}
    assert len(content["curves"]["value_similarity"]) == 30
    assert first.read_bytes() == second.read_bytes()
    assert [entry.name for entry in first.parent.iterdir()] == ["p.json"]
    assert read_profile(first, num_layers=30).bands == Bands(1, 5, 20)


def test_an_own_profile_that_does_not_fit_is_refused_by_its_path(home: Path) -> None:
    write_profile(report("f", Bands(1, 5, 20)), own_profile_path("f"))

    with pytest.raises(ProfileError, match=r"stop 20 is past") as caught:
        choose_bands(None, "f", num_layers=12)
    assert str(home) in str(caught.value)


@pytest.mark.parametrize("num_layers", [1, 2, 7, 8, 16, 80])
def test_the_default_bands_lie_inside_a_model_of_any_depth(num_layers: int) -> None:
    bands = default_bands(num_layers)

    assert bands.inject == 0
    assert bands.stop == num_layers - 1
    assert bands.select == min(max(1, num_layers // 8), num_layers - 1)
