"""`relaykv profile`: finds a model's relay bands and writes them where `serve` looks for them."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from relaykv.engine.band_search import band_shares, find_bands
from relaykv.engine.handoff import read_handoffs, shipped_handoffs
from relaykv.engine.layer_curves import Measurement, mean_curves
from relaykv.engine.profile_plot import can_draw, draw_profile
from relaykv.engine.relay_profile import (
    ChosenBands,
    ProfileError,
    ProfileReport,
    RelayProfile,
    own_profile_path,
    write_profile,
)
from relaykv.server.chat_template import HuggingFaceTemplate
from relaykv.server.model_command import (
    add_model_arguments,
    at_least,
    engine_options,
    prompt_of,
    say,
    with_progress,
)

_MIN_TOKENS = 48  # shorter answers are hardly ever relayed
_FEW_HANDOFFS = 8  # with fewer the bands are an accident
_DESCRIPTION = """
Finds out in which layers text that one agent hands to another needs its KV cache repaired, for the
policy `relay` (RelayCaching, arXiv 2603.13289). The model writes answers to a set of hand-offs and
reads them in other prompts; what decoding left in the KV cache is compared with what those prompts
give when they are computed in full. The bands, the curves they were read from and a picture of
them go to a file that `relaykv serve` finds by the model's fingerprint. docs/profile.md says more.
"""


def add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line's parser."""
    profile = commands.add_parser(
        "profile", help="find a model's relay bands", description=_DESCRIPTION
    )
    add_model_arguments(profile)
    profile.add_argument(
        "--tokens",
        type=at_least(_MIN_TOKENS),
        metavar="COUNT",
        default=128,
        help="that each answer has at most (default: %(default)s)",
    )
    profile.add_argument(
        "--output",
        type=_json_path,
        metavar="FILE",
        help="where the profile goes, and a PNG beside it (default: profiles/FINGERPRINT.json in "
        "RELAYKV_HOME, where serve finds it)",
    )


def run_profile(options: argparse.Namespace) -> int:
    """Profiles and writes. Returns the exit code; nothing is written unless all went well."""
    # The engine warns of a model that has no profile: that is why this runs.
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    if not can_draw():
        say("matplotlib is missing, no picture will be drawn; pip install 'relaykv[profile]'")
    try:
        _profile(options)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"relaykv: error: {error}", file=sys.stderr)
        return 1
    return 0


def make_report(
    measurements: Sequence[Measurement], model: str, fingerprint: str, dtype: str, command: str
) -> ProfileReport:
    """Decides on the bands.

    Raises:
        ProfileError: nothing was relayed.
    """
    if not measurements:
        raise ProfileError(
            "no answer came back long enough in a consumer's prompt to be relayed: "
            "the model writes too little, or other tokens than its text is read as"
        )
    curves = [measurement.curves for measurement in measurements]
    mean = mean_curves(curves)
    bands = find_bands(mean)
    return ProfileReport(
        profile=RelayProfile(model, fingerprint, bands),
        dtype=dtype,
        command=command,
        num_handoffs=len(measurements),
        num_tokens=sum(measurement.num_tokens for measurement in measurements),
        shares=band_shares(curves, bands),
        curves=mean,
    )


def _profile(options: argparse.Namespace) -> None:
    handoffs = shipped_handoffs() if options.handoffs is None else read_handoffs(options.handoffs)
    handoffs = handoffs[: options.limit]
    # Imported here: --help never needs torch.
    from relaykv.engine.assembly import prepare
    from relaykv.engine.profiler import Profiler

    parts = prepare(engine_options(options))
    prompt = prompt_of(HuggingFaceTemplate.from_folder(parts.folder), parts.tokenizer)
    profiler = Profiler(parts, prompt, handoffs, options.tokens)
    measurements = with_progress(profiler.measure, f"profiling {parts.card.name}", len(handoffs))
    before = parts.relay_bands
    fingerprint = before.fingerprint
    dtype = str(parts.model.dtype).removeprefix("torch.")
    report = make_report(measurements, parts.card.name, fingerprint, dtype, _command(options))
    output: Path = options.output or own_profile_path(fingerprint)
    write_profile(report, output)
    if can_draw():
        draw_profile(report, output.with_suffix(".png"))
    _print(report, before, len(handoffs), output)


def _print(report: ProfileReport, before: ChosenBands, num_handoffs: int, output: Path) -> None:
    profile, shares = report.profile, report.shares
    print(
        f"{profile.model} ({profile.fingerprint}, {report.curves.num_layers} layers, "
        f"{report.dtype}): {report.num_handoffs} of {num_handoffs} hand-offs relayed "
        f"{report.num_tokens} tokens"
    )
    bands, old = profile.bands, before.bands
    print(f"bands   inject {bands.inject}, select {bands.select}, stop {bands.stop}")
    print(
        f"        the same in {shares.inject:.0%}, {shares.select:.0%} and {shares.stop:.0%} of "
        "random draws from the hand-offs"
    )
    print(f"before  inject {old.inject}, select {old.select}, stop {old.stop} ({before.source})")
    print(f"profile {output}")
    if can_draw():
        print(f"picture {output.with_suffix('.png')}")
    if report.num_handoffs < _FEW_HANDOFFS:
        say(f"{report.num_handoffs} hand-offs are few: do not trust these bands")


def _command(options: argparse.Namespace) -> str:
    """The command line without what does not change the profile."""
    words = ["relaykv", "profile", "--model", options.model, "--tokens", str(options.tokens)]
    if options.handoffs is not None:
        words += ["--handoffs", options.handoffs.name]
    if options.limit is not None:
        words += ["--limit", str(options.limit)]
    return shlex.join([*words, "--device", options.device, "--dtype", options.dtype])


def _json_path(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".json":
        raise argparse.ArgumentTypeError(f"'{text}' does not end in .json")
    return path
