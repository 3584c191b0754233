"""`relaykv profile`: finds a model's relay bands and writes them where `serve` looks for them."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from relaykv.engine.band_search import band_shares, find_bands
from relaykv.engine.handoff import read_handoffs, shipped_handoffs
from relaykv.engine.layer_curves import Measurement, mean_curves
from relaykv.engine.options import EngineOptions
from relaykv.engine.profile_plot import can_draw, draw_profile
from relaykv.engine.relay_profile import (
    ChosenBands,
    ProfileError,
    ProfileReport,
    RelayProfile,
    own_profile_path,
    write_profile,
)
from relaykv.server.chat_template import ChatTemplate, HuggingFaceTemplate

_MIN_TOKENS = 48  # shorter answers are hardly ever relayed
_FEW_HANDOFFS = 8  # with fewer the bands are an accident
_DESCRIPTION = """
Finds out in which layers text that one agent hands to another needs its KV cache repaired, for the
policy `relay` (RelayCaching, arXiv 2603.13289). The model writes answers to a set of hand-offs and
reads them in other prompts; what decoding left in the KV cache is compared with what those prompts
give when they are computed in full. The bands, the curves they were read from and a picture of
them go to a file that `relaykv serve` finds by the model's fingerprint. docs/profile.md says more.
"""
_BAR = "{l_bar}{bar}| {n:.1f} of {total} hand-offs [{elapsed}, {remaining} left]"


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...


def add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line's parser."""
    defaults = EngineOptions()
    profile = commands.add_parser(
        "profile", help="find a model's relay bands", description=_DESCRIPTION
    )
    profile.add_argument(
        "--model",
        metavar="NAME_OR_DIR",
        default=defaults.model,
        help="'default', a Hugging Face folder or a hub id (default: %(default)s)",
    )
    profile.add_argument(
        "--handoffs",
        type=Path,
        metavar="FILE",
        help="hand-offs of your own, as JSON Lines, instead of the shipped ones",
    )
    profile.add_argument(
        "--limit", type=_at_least(1), metavar="COUNT", help="use only the first hand-offs"
    )
    profile.add_argument(
        "--tokens",
        type=_at_least(_MIN_TOKENS),
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
    profile.add_argument(
        "--device",
        default=defaults.device,
        help="cpu, cuda or cuda:1; auto: a GPU when there is one (default: %(default)s)",
    )
    profile.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default=defaults.dtype,
        help="type of weights and KV cache (default: %(default)s)",
    )
    profile.add_argument(
        "--threads",
        type=_at_least(1),
        metavar="COUNT",
        help="CPU threads of torch (default: torch decides)",
    )


def run_profile(options: argparse.Namespace) -> int:
    """Profiles and writes. Returns the exit code; nothing is written unless all went well."""
    # The engine warns of a model that has no profile: that is why this runs.
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    if not can_draw():
        _say("matplotlib is missing, no picture will be drawn; pip install 'relaykv[profile]'")
    try:
        _profile(options)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"relaykv: error: {error}", file=sys.stderr)
        return 1
    return 0


def prompt_of(template: ChatTemplate, tokenizer: Encoder) -> Callable[[str, str], list[int]]:
    """Renders and tokenises a system text, unless it is empty, and a user text."""

    def prompt(system: str, user: str) -> list[int]:
        messages = [{"role": "user", "content": user}]
        if not system:
            return tokenizer.encode(template.render(messages))
        try:
            text = template.render([{"role": "system", "content": system}, *messages])
        except Exception:  # some templates refuse system messages, each in its own way
            text = template.render([{"role": "user", "content": f"{system}\n\n{user}"}])
        return tokenizer.encode(text)

    return prompt


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

    parts = prepare(
        EngineOptions(
            model=options.model,
            device=options.device,
            dtype=options.dtype,
            num_threads=options.threads,
            deterministic=True,
        )
    )
    prompt = prompt_of(HuggingFaceTemplate.from_folder(parts.folder), parts.tokenizer)
    profiler = Profiler(parts, prompt, handoffs, options.tokens)
    measurements = _measure(profiler.measure, f"profiling {parts.card.name}", len(handoffs))
    before = parts.relay_bands
    fingerprint = before.fingerprint
    dtype = str(parts.model.dtype).removeprefix("torch.")
    report = make_report(measurements, parts.card.name, fingerprint, dtype, _command(options))
    output: Path = options.output or own_profile_path(fingerprint)
    write_profile(report, output)
    if can_draw():
        draw_profile(report, output.with_suffix(".png"))
    _print(report, before, len(handoffs), output)


def _measure(
    measure: Callable[[Callable[[float], None]], Iterator[Measurement]], title: str, total: int
) -> list[Measurement]:
    # Closed also when the user interrupts: the bar must not swallow what is printed next.
    # The time left is judged by the whole run so far: decoding and reading take turns.
    with tqdm(total=total, desc=title, bar_format=_BAR, smoothing=0, mininterval=0.5) as bar:
        return list(measure(bar.update))


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
        _say(f"{report.num_handoffs} hand-offs are few: do not trust these bands")


def _command(options: argparse.Namespace) -> str:
    """The command line without what does not change the profile."""
    words = ["relaykv", "profile", "--model", options.model, "--tokens", str(options.tokens)]
    if options.handoffs is not None:
        words += ["--handoffs", options.handoffs.name]
    if options.limit is not None:
        words += ["--limit", str(options.limit)]
    return shlex.join([*words, "--device", options.device, "--dtype", options.dtype])


def _say(text: str) -> None:
    print(f"relaykv: {text}", file=sys.stderr)


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"'{text}' is no whole number of at least {least}")
        return int(text)

    return number


def _json_path(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".json":
        raise argparse.ArgumentTypeError(f"'{text}' does not end in .json")
    return path
