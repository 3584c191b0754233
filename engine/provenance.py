"""Tells token by token what a prompt's KV came from, as runs of tokens that are alike."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from relaykv.engine.prefill_plan import PrefillPlan, Span, SpanKind
from relaykv.engine.relay_report import PromptRun, RunKind, RunSource


def prompt_runs(
    plan: PrefillPlan,
    sources: Sequence[RunSource],
    recomputed: Mapping[int, Sequence[int]],
) -> tuple[PromptRun, ...]:
    """Lists the runs that cover a prompt exactly once, in order, each as long as can be.

    Args:
        sources: of the plan's RELAY spans, in their order.
        recomputed: tokens computed again, as sorted offsets from the position they are under;
            a long span stands there in several parts.

    Raises:
        ValueError: there are more or fewer sources than RELAY spans.
    """
    again = sorted(start + offset for start, offsets in recomputed.items() for offset in offsets)
    relays = [span for span in plan.spans if span.kind is SpanKind.RELAY]
    source_of = {span.start: source for span, source in zip(relays, sources, strict=True)}
    runs: list[PromptRun] = []
    for span in plan.spans:
        if span.kind is SpanKind.RELAY:
            inside = again[bisect_left(again, span.start) : bisect_left(again, span.stop)]
            for run in _relayed_runs(span, source_of[span.start], inside):
                _append(runs, run)
        else:
            kind = RunKind.PREFIX if span.kind is SpanKind.PREFIX else RunKind.COMPUTED
            _append(runs, PromptRun(kind, span.start, span.stop))
    return tuple(runs)


def _relayed_runs(span: Span, source: RunSource, again: Sequence[int]) -> Iterator[PromptRun]:
    """The parts of a relayed span between and at the positions computed again."""

    def run(kind: RunKind, start: int, stop: int) -> PromptRun:
        place = RunSource(source.request_id, source.start + start - span.start)
        return PromptRun(kind, start, stop, place)

    position = span.start
    for recomputed in again:
        if recomputed > position:
            yield run(RunKind.RELAYED, position, recomputed)
        position = recomputed + 1
        yield run(RunKind.RECOMPUTED, recomputed, position)
    if position < span.stop:
        yield run(RunKind.RELAYED, position, span.stop)


def _append(runs: list[PromptRun], run: PromptRun) -> None:
    """Adds a run behind the others, or to the last one when it goes on where that ends."""
    last = runs[-1] if runs else None
    if last is not None and last.kind is run.kind and run.source == _source_behind(last):
        runs[-1] = PromptRun(last.kind, last.start, run.stop, last.source)
    else:
        runs.append(run)


def _source_behind(run: PromptRun) -> RunSource | None:
    if run.source is None:
        return None
    return RunSource(run.source.request_id, run.source.start + run.stop - run.start)
