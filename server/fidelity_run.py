"""Runs one of the tests of `relaykv fidelity` and makes its report."""

from __future__ import annotations

import argparse
import enum
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from relaykv.engine import chain_report, choice_report, fidelity_report
from relaykv.engine.chain import Chain, read_chains, shipped_chains
from relaykv.engine.chain_report import ChainReport, HopScore, drifts
from relaykv.engine.choice_report import ChoiceReport, ChoiceScore, summarise_choices
from relaykv.engine.choice_trial import (
    ChoiceTrial,
    read_flips,
    read_judges,
    shipped_flips,
    shipped_judges,
)
from relaykv.engine.client import ModelCard
from relaykv.engine.drift_plot import draw_drift
from relaykv.engine.fidelity_report import FidelityReport, Subject, full_answers
from relaykv.engine.fidelity_scores import Score, summarise
from relaykv.engine.frontier_plot import draw_frontier
from relaykv.engine.handoff import (
    Handoff,
    HandoffError,
    read_handoffs,
    shipped_handoffs,
    shipped_questions,
)
from relaykv.engine.relay_profile import ChosenBands
from relaykv.server.chat_template import HuggingFaceTemplate
from relaykv.server.model_command import engine_options, prompt_of, with_progress

T = TypeVar("T")


class FidelityTest(enum.StrEnum):
    """What is to be found out."""

    HANDOFFS = "handoffs"  # what policies compute and how far their answers drift
    CHAIN = "chain"  # how they drift from hop to hop
    JUDGE = "judge"  # whether judges choose the same candidate
    FLIP = "flip"  # whether a role that is turned round turns the answer


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a test has found out."""

    text: str  # for people
    content: Mapping[str, Any]  # for programs
    num_cases: int  # that relayed something
    draw: Callable[[Path], None] | None  # writes a picture, where there is one


class _Model(Protocol):
    @property
    def dtype(self) -> object: ...


class _Parts(Protocol):
    """What a report tells of the engine's parts."""

    @property
    def model(self) -> _Model: ...

    @property
    def card(self) -> ModelCard: ...

    @property
    def relay_bands(self) -> ChosenBands: ...


def run_test(options: argparse.Namespace) -> Outcome:
    """Measures, with a progress bar.

    Raises:
        OSError, RuntimeError, ValueError: it cannot be done; the message says why in one line.
    """
    if options.learn is not None and options.test != FidelityTest.HANDOFFS:
        raise ValueError("--learn is for --test handoffs alone")
    match FidelityTest(options.test):
        case FidelityTest.HANDOFFS:
            return _run_handoffs(options)
        case FidelityTest.CHAIN:
            return _run_chain(options)
        case FidelityTest.JUDGE | FidelityTest.FLIP:
            return _run_choices(options)


def _run_handoffs(options: argparse.Namespace) -> Outcome:
    if options.answer_tokens > options.greedy_tokens:
        raise ValueError("--answer-tokens cannot be more than --greedy-tokens")
    handoffs = _handoffs(options.handoffs)[: options.limit]
    lessons = [] if options.learn is None else read_handoffs(options.learn)
    repeated = {lesson.id for lesson in lessons} & {handoff.id for handoff in handoffs}
    if repeated:
        raise ValueError(f"'{min(repeated)}' is to be learned from and to be measured")
    # Imported here, as in the functions below: --help never needs torch.
    from relaykv.engine.assembly import prepare
    from relaykv.engine.fidelity import Fidelity, FidelityLengths, choose_policies

    parts = prepare(engine_options(options))
    parts, policies = choose_policies(parts, options.policies, options.bands)
    prompt = prompt_of(HuggingFaceTemplate.from_folder(parts.folder), parts.tokenizer)
    lengths = FidelityLengths(options.tokens, options.answer_tokens, options.greedy_tokens)
    fidelity = Fidelity(parts, prompt, handoffs, policies, lengths, lessons)
    total = len(lessons) + len(handoffs)
    results = with_progress(fidelity.measure, f"reading {parts.card.name}", total)
    scores: list[Score] = _found([score for result in results for score in result.scores])
    report = FidelityReport(
        subject=_subject(parts, options, policies),
        num_handoffs=len(handoffs),
        num_lessons=len(lessons),
        num_compared=options.answer_tokens,
        num_greedy=options.greedy_tokens,
        full=full_answers([result.right for result in results]),
        summaries=tuple(summarise(scores)),
        scores=tuple(scores),
    )
    text = fidelity_report.markdown(report)
    return Outcome(
        text, asdict(report), report.num_relayed, lambda path: draw_frontier(report, path)
    )


def _run_chain(options: argparse.Namespace) -> Outcome:
    chains = _chains(options.handoffs)[: options.limit]
    from relaykv.engine.assembly import prepare
    from relaykv.engine.chain_fidelity import ChainFidelity
    from relaykv.engine.fidelity import choose_policies

    parts = prepare(engine_options(options))
    parts, policies = choose_policies(parts, options.policies, options.bands)
    prompt = prompt_of(HuggingFaceTemplate.from_folder(parts.folder), parts.tokenizer)
    fidelity = ChainFidelity(parts, prompt, chains, policies, options.tokens, options.answer_tokens)
    title = f"passing on, {parts.card.name}"
    results = with_progress(fidelity.measure, title, len(chains), "chains")
    scores: list[HopScore] = _found([score for result in results for score in result])
    report = ChainReport(
        subject=_subject(parts, options, policies),
        num_chains=len(chains),
        num_compared=options.answer_tokens,
        drifts=tuple(drifts(scores)),
        scores=tuple(scores),
    )
    text = chain_report.markdown(report)
    return Outcome(text, asdict(report), report.num_relayed, lambda path: draw_drift(report, path))


def _run_choices(options: argparse.Namespace) -> Outcome:
    trials = _trials(options)[: options.limit]
    from relaykv.engine.assembly import prepare
    from relaykv.engine.choice_fidelity import ChoiceFidelity
    from relaykv.engine.fidelity import choose_policies

    parts = prepare(engine_options(options))
    parts, policies = choose_policies(parts, options.policies, options.bands)
    prompt = prompt_of(HuggingFaceTemplate.from_folder(parts.folder), parts.tokenizer)
    fidelity = ChoiceFidelity(parts, prompt, trials, policies, options.tokens)
    title = f"choosing, {parts.card.name}"
    results = with_progress(fidelity.measure, title, len(trials), "trials")
    scores: list[ChoiceScore] = _found([score for result in results for score in result])
    report = ChoiceReport(
        subject=_subject(parts, options, policies),
        num_trials=len(trials),
        summaries=tuple(summarise_choices(scores)),
        scores=tuple(scores),
    )
    return Outcome(choice_report.markdown(report), asdict(report), report.num_relayed, None)


def _handoffs(path: Path | None) -> list[Handoff]:
    if path is None:
        return [*shipped_handoffs(), *shipped_questions()]
    return read_handoffs(path)


def _chains(path: Path | None) -> list[Chain]:
    return shipped_chains() if path is None else read_chains(path)


def _trials(options: argparse.Namespace) -> list[ChoiceTrial]:
    path: Path | None = options.handoffs
    if options.test == FidelityTest.JUDGE:
        return shipped_judges() if path is None else read_judges(path)
    return shipped_flips() if path is None else read_flips(path)


def _found(scores: list[T]) -> list[T]:
    if not scores:
        raise HandoffError(
            "no text came back long enough in another agent's prompt to be relayed: "
            "the model writes too little, or other tokens than its text is read as"
        )
    return scores


def _subject(parts: _Parts, options: argparse.Namespace, policies: Sequence[str]) -> Subject:
    dtype = str(parts.model.dtype).removeprefix("torch.")
    command = _command(options, policies)
    return Subject(parts.card.name, parts.relay_bands.fingerprint, dtype, command)


def _command(options: argparse.Namespace, policies: Sequence[str]) -> str:
    """The command line without what does not change the scores."""
    words = ["relaykv", "fidelity", "--model", options.model]
    if options.test != FidelityTest.HANDOFFS:
        words += ["--test", options.test]
    if options.learn is not None:
        words += ["--learn", options.learn.name]
    if options.handoffs is not None:
        words += ["--handoffs", options.handoffs.name]
    if options.limit is not None:
        words += ["--limit", str(options.limit)]
    words += ["--policies", ",".join(name for name in policies if " " not in name)]
    for bands in options.bands:
        words += ["--bands", f"{bands.inject},{bands.select},{bands.stop}"]
    words += ["--tokens", str(options.tokens)]
    if options.test in (FidelityTest.HANDOFFS, FidelityTest.CHAIN):
        words += ["--answer-tokens", str(options.answer_tokens)]
    if options.test == FidelityTest.HANDOFFS:
        words += ["--greedy-tokens", str(options.greedy_tokens)]
    return shlex.join([*words, "--device", options.device, "--dtype", options.dtype])
