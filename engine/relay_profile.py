"""Where a model's relayed KV needs repair: the layer bands of the policy `relay`, from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaykv.engine.policy import Bands

_SHIPPED = Path(__file__).parent / "profiles"


class ProfileError(ValueError):
    """A profile file that cannot be used; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class RelayProfile:
    """Bands of one model."""

    model: str  # for people
    fingerprint: str  # names the weights, whatever their numeric type
    bands: Bands


def read_profile(path: Path, num_layers: int) -> RelayProfile:
    """Reads a profile and checks it against the model's depth.

    Raises:
        ProfileError: unreadable, a field is missing, or the bands do not fit the model.
    """
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")), num_layers)
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"cannot use profile {path}: {error}") from error


def find_profile(fingerprint: str, num_layers: int) -> RelayProfile | None:
    """The profile that ships with the package for this model, if there is one."""
    for entry in sorted(_SHIPPED.glob("*.json")):
        data = json.loads(entry.read_text(encoding="utf-8"))
        if data["fingerprint"] == fingerprint:
            return _parse(data, num_layers)
    return None


def default_bands(num_layers: int) -> Bands:
    """For a model without a profile: nothing is assumed of its shallow or deep layers.

    Every relayed token is computed from the embeddings through an eighth of the layers, then
    the selected ones through all the rest.
    """
    last = num_layers - 1
    return Bands(0, min(max(1, num_layers // 8), last), last)


def _parse(data: dict[str, Any], num_layers: int) -> RelayProfile:
    bands = Bands(int(data["inject"]), int(data["select"]), int(data["stop"]))
    if bands.stop >= num_layers:
        raise ValueError(f"stop {bands.stop} is past the model's last layer {num_layers - 1}")
    return RelayProfile(str(data["model"]), str(data["fingerprint"]), bands)
