from __future__ import annotations

import json
from pathlib import Path

import pytest

from relaykv.engine.policy import Bands
from relaykv.engine.relay_profile import (
    ProfileError,
    default_bands,
    find_profile,
    read_profile,
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


def test_the_default_model_has_a_shipped_profile() -> None:
    profile = find_profile("e3ee661728a74ccc", num_layers=30)

    assert profile is not None
    assert profile.model == "SmolLM2-135M-Instruct"
    assert profile.bands == Bands(2, 4, 29)


def test_an_unknown_model_has_no_shipped_profile() -> None:
    assert find_profile("0" * 16, num_layers=30) is None


@pytest.mark.parametrize("num_layers", [1, 2, 7, 8, 16, 80])
def test_the_default_bands_lie_inside_a_model_of_any_depth(num_layers: int) -> None:
    bands = default_bands(num_layers)

    assert bands.inject == 0
    assert bands.stop == num_layers - 1
    assert bands.select == min(max(1, num_layers // 8), num_layers - 1)
