"""Where a model's relayed KV needs repair: the layer bands of the policy `relay`, from a file."""

from __future__ import annotations

import enum
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaykv.engine.band_search import BandShares
from relaykv.engine.layer_curves import FloatArray, LayerCurves
from relaykv.engine.model_store import cache_home
from relaykv.engine.policy import Bands

_SHIPPED = Path(__file__).parent / "profiles"
_NUM_DIGITS = 6  # of curves in a file


class ProfileError(ValueError):
    """A profile that cannot be used or made; the message says why in one line."""


class BandsSource(enum.StrEnum):
    """Where the bands in use come from."""

    GIVEN = "given profile"  # named by the user
    OWN = "own profile"  # written by `relaykv profile` into the folder of profiles
    SHIPPED = "shipped profile"
    DEFAULT = "safe default"  # nothing is known of this model


@dataclass(frozen=True, slots=True)
class RelayProfile:
    """Bands of one model."""

    model: str  # for people
    fingerprint: str  # names the weights, whatever their numeric type
    bands: Bands


@dataclass(frozen=True, slots=True)
class ChosenBands:
    """The bands that an engine uses, and why."""

    bands: Bands
    source: BandsSource
    fingerprint: str  # of the model that is served
    path: Path | None = None  # of the profile
    made_for: str | None = None  # the fingerprint in the profile


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """Everything that profiling a model has found out."""

    profile: RelayProfile
    dtype: str  # that it was measured in
    command: str
    num_handoffs: int  # that relayed something
    num_tokens: int  # relayed in all of them
    shares: BandShares
    curves: LayerCurves


def read_profile(path: Path, num_layers: int) -> RelayProfile:
    """Reads a profile and checks it against the model's depth.

    Raises:
        ProfileError: unreadable, a field is missing, or the bands do not fit the model.
    """
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")), num_layers)
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"cannot use profile {path}: {error}") from error


def write_profile(report: ProfileReport, path: Path) -> None:
    """Writes a profile with what it was made from, in one step; makes the folder.

    Nothing in it depends on the time or the machine: the same measurements give the same file.

    Raises:
        OSError: the file cannot be written.
    """
    profile, curves, shares = report.profile, report.curves, report.shares
    bands = profile.bands
    content = {
        "model": profile.model,
        "fingerprint": profile.fingerprint,
        "inject": bands.inject,
        "select": bands.select,
        "stop": bands.stop,
        "share_of_draws": {
            "inject": shares.inject,
            "select": shares.select,
            "stop": shares.stop,
        },
        "dtype": report.dtype,
        "command": report.command,
        "num_handoffs": report.num_handoffs,
        "num_tokens": report.num_tokens,
        "curves": {
            "value_similarity": _rounded(curves.value_similarity),
            "key_similarity": _rounded(curves.key_similarity),
            "rank_correlation": _rounded(curves.rank_correlation),
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def own_profile_path(fingerprint: str) -> Path:
    """Where `relaykv profile` writes a model's profile, and `serve` looks first."""
    return cache_home() / "profiles" / f"{fingerprint}.json"


def choose_bands(given: Path | None, fingerprint: str, num_layers: int) -> ChosenBands:
    """The bands of the given profile, else of the model's own, else of the shipped one, else safe.

    Raises:
        ProfileError: a profile that is there cannot be used.
    """
    own = own_profile_path(fingerprint)
    if given is not None:
        return _chosen(given, BandsSource.GIVEN, fingerprint, num_layers)
    if own.is_file():
        return _chosen(own, BandsSource.OWN, fingerprint, num_layers)
    for path in sorted(_SHIPPED.glob("*.json")):
        if json.loads(path.read_text(encoding="utf-8"))["fingerprint"] == fingerprint:
            return _chosen(path, BandsSource.SHIPPED, fingerprint, num_layers)
    return ChosenBands(default_bands(num_layers), BandsSource.DEFAULT, fingerprint)


def default_bands(num_layers: int) -> Bands:
    """For a model without a profile: nothing is assumed of its shallow or deep layers.

    Every relayed token is computed from the embeddings through an eighth of the layers, then
    the selected ones through all the rest.
    """
    last = num_layers - 1
    return Bands(0, min(max(1, num_layers // 8), last), last)


def _chosen(path: Path, source: BandsSource, fingerprint: str, num_layers: int) -> ChosenBands:
    profile = read_profile(path, num_layers)
    return ChosenBands(profile.bands, source, fingerprint, path, profile.fingerprint)


def _parse(data: dict[str, Any], num_layers: int) -> RelayProfile:
    bands = Bands(int(data["inject"]), int(data["select"]), int(data["stop"]))
    if bands.stop >= num_layers:
        raise ValueError(f"stop {bands.stop} is past the model's last layer {num_layers - 1}")
    return RelayProfile(str(data["model"]), str(data["fingerprint"]), bands)


def _rounded(curve: FloatArray) -> list[float]:
    return [round(float(value), _NUM_DIGITS) for value in curve]
