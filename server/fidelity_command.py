"""`relaykv fidelity`: how near each policy's answers come to a full prefill, and at what cost."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from relaykv.engine.fidelity_report import write_json, write_text
from relaykv.engine.policy import Bands
from relaykv.engine.profile_plot import can_draw
from relaykv.server.fidelity_run import FidelityTest, run_test
from relaykv.server.model_command import add_model_arguments, at_least, say

_MIN_TOKENS = 48  # shorter texts are hardly ever relayed
_FEW_CASES = 8
_DESCRIPTION = """
Lets agents hand text on and reads it under several relay policies. For each policy: the share of
the relayed text's layer-tokens that it computes, how far next-token distributions drift from those
of a full prefill, how long greedy answers agree, and whether they hold what was asked for. Prints
a table and writes it beside every single score and a picture. docs/fidelity.md says more.
"""


def add_fidelity(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line's parser."""
    fidelity = commands.add_parser(
        "fidelity", help="compare relay policies with a full prefill", description=_DESCRIPTION
    )
    add_model_arguments(fidelity)
    fidelity.add_argument(
        "--test",
        choices=[test.value for test in FidelityTest],
        default=FidelityTest.HANDOFFS.value,
        help="handoffs: what policies compute and how far answers drift; chain: how that grows "
        "over six hops; judge: whether the same of four candidates is chosen; flip: whether a role "
        "that is turned round turns the answer (default: %(default)s)",
    )
    fidelity.add_argument(
        "--learn",
        type=Path,
        metavar="FILE",
        help="hand-offs that policies which learn have seen before; for the test handoffs",
    )
    fidelity.add_argument(
        "--policies",
        type=_names,
        metavar="NAME,NAME",
        help="policies to compare (default: every one that relays)",
    )
    fidelity.add_argument(
        "--bands",
        type=_bands,
        action="append",
        default=[],
        metavar="INJECT,SELECT,STOP",
        help="compare the policy relay with these bands too; may be given several times",
    )
    fidelity.add_argument(
        "--tokens",
        type=at_least(_MIN_TOKENS),
        metavar="COUNT",
        default=200,
        help="that each handed on text has at most (default: %(default)s)",
    )
    fidelity.add_argument(
        "--answer-tokens",
        type=at_least(1),
        metavar="COUNT",
        default=32,
        help="positions of the answer whose distributions are compared (default: %(default)s)",
    )
    fidelity.add_argument(
        "--greedy-tokens",
        type=at_least(1),
        metavar="COUNT",
        default=64,
        help="that greedy answers have at most (default: %(default)s)",
    )
    fidelity.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        default=Path("fidelity"),
        help="where TEST.json, TEST.md and TEST.png go (default: %(default)s)",
    )


def run_fidelity(options: argparse.Namespace) -> int:
    """Measures and writes. Returns the exit code; nothing is written unless all went well."""
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    if not can_draw():
        say("matplotlib is missing, no picture will be drawn; pip install 'relaykv[profile]'")
    try:
        _fidelity(options)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"relaykv: error: {error}", file=sys.stderr)
        return 1
    return 0


def _fidelity(options: argparse.Namespace) -> None:
    outcome = run_test(options)
    if outcome.num_cases < _FEW_CASES:
        say(f"{outcome.num_cases} cases are few: do not trust these intervals")
    output: Path = options.output / f"{options.test}.json"
    write_json(outcome.content, output)
    write_text(outcome.text, output.with_suffix(".md"))
    print(outcome.text)
    print(f"scores  {output}")
    if outcome.draw is not None and can_draw():
        outcome.draw(output.with_suffix(".png"))
        print(f"picture {output.with_suffix('.png')}")


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"'{text}' is no list of names, with commas between them")
    return list(dict.fromkeys(names))


def _bands(text: str) -> Bands:
    try:
        inject, select, stop = (int(part) for part in text.split(","))
        return Bands(inject, select, stop)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not INJECT,SELECT,STOP, three layers that do not fall"
        ) from error
