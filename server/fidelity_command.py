"""`relaykv fidelity`: how near each policy's answers come to a full prefill, and at what cost."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from pathlib import Path

from relaykv.engine.fidelity_report import (
    FidelityReport,
    Subject,
    full_answers,
    markdown,
    write_json,
    write_text,
)
from relaykv.engine.fidelity_scores import summarise
from relaykv.engine.frontier_plot import draw_frontier
from relaykv.engine.handoff import (
    Handoff,
    HandoffError,
    read_handoffs,
    shipped_handoffs,
    shipped_questions,
)
from relaykv.engine.policy import Bands
from relaykv.engine.profile_plot import can_draw
from relaykv.server.chat_template import HuggingFaceTemplate
from relaykv.server.model_command import (
    add_model_arguments,
    at_least,
    engine_options,
    prompt_of,
    say,
    with_progress,
)

_MIN_TOKENS = 48  # shorter texts are hardly ever relayed
_FEW_HANDOFFS = 8
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
        help="where handoffs.json, handoffs.md and handoffs.png go (default: %(default)s)",
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
    if options.answer_tokens > options.greedy_tokens:
        raise ValueError("--answer-tokens cannot be more than --greedy-tokens")
    handoffs = _handoffs(options)
    report = _measure(options, handoffs)
    if report.num_relayed < _FEW_HANDOFFS:
        say(f"{report.num_relayed} hand-offs are few: do not trust these intervals")
    text = markdown(report)
    output: Path = options.output / "handoffs.json"
    write_json(report, output)
    write_text(text, output.with_suffix(".md"))
    if can_draw():
        draw_frontier(report, output.with_suffix(".png"))
    print(text)
    print(f"scores  {output}")
    if can_draw():
        print(f"picture {output.with_suffix('.png')}")


def _handoffs(options: argparse.Namespace) -> list[Handoff]:
    if options.handoffs is not None:
        handoffs = read_handoffs(options.handoffs)
    else:
        handoffs = [*shipped_handoffs(), *shipped_questions()]
    return handoffs[: options.limit]


def _measure(options: argparse.Namespace, handoffs: list[Handoff]) -> FidelityReport:
    # Imported here: --help never needs torch.
    from relaykv.engine.assembly import prepare
    from relaykv.engine.fidelity import Fidelity, FidelityLengths, choose_policies

    parts = prepare(engine_options(options))
    parts, policies = choose_policies(parts, options.policies, options.bands)
    prompt = prompt_of(HuggingFaceTemplate.from_folder(parts.folder), parts.tokenizer)
    lengths = FidelityLengths(options.tokens, options.answer_tokens, options.greedy_tokens)
    fidelity = Fidelity(parts, prompt, handoffs, policies, lengths)
    results = with_progress(fidelity.measure, f"reading {parts.card.name}", len(handoffs))
    scores = [score for result in results for score in result.scores]
    if not scores:
        raise HandoffError(
            "no text came back long enough in a consumer's prompt to be relayed: "
            "the model writes too little, or other tokens than its text is read as"
        )
    dtype = str(parts.model.dtype).removeprefix("torch.")
    subject = Subject(
        parts.card.name, parts.relay_bands.fingerprint, dtype, _command(options, policies)
    )
    return FidelityReport(
        subject=subject,
        num_handoffs=len(handoffs),
        num_compared=options.answer_tokens,
        num_greedy=options.greedy_tokens,
        full=full_answers([result.right for result in results]),
        summaries=tuple(summarise(scores)),
        scores=tuple(scores),
    )


def _command(options: argparse.Namespace, policies: list[str]) -> str:
    """The command line without what does not change the scores."""
    words = ["relaykv", "fidelity", "--model", options.model]
    if options.handoffs is not None:
        words += ["--handoffs", options.handoffs.name]
    if options.limit is not None:
        words += ["--limit", str(options.limit)]
    words += ["--policies", ",".join(name for name in policies if " " not in name)]
    for bands in options.bands:
        words += ["--bands", f"{bands.inject},{bands.select},{bands.stop}"]
    words += ["--tokens", str(options.tokens), "--answer-tokens", str(options.answer_tokens)]
    words += ["--greedy-tokens", str(options.greedy_tokens)]
    return shlex.join([*words, "--device", options.device, "--dtype", options.dtype])


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
