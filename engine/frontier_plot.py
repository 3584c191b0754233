"""Draws the frontier: what policies compute against how far their answers drift."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relaykv.engine.fidelity_report import FidelityReport
from relaykv.engine.fidelity_scores import Summary, is_published

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FLOOR = 1e-7  # rounding; a logarithm has no zero


def draw_frontier(report: FidelityReport, path: Path) -> None:
    """Writes a picture of one point for each policy, with the interval of its mean divergence.

    Args:
        path: of a PNG file, whose folder exists.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    # Imported here: it is an extra. Figures made without pyplot leave no state behind.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.set_yscale("log")
    for summary in report.summaries:
        _draw_point(axes, summary)
    right = 110.0 * max(s.computed_share for s in report.summaries) + 5.0  # names need room
    _draw_frontier(axes, [s for s in report.summaries if is_published(s.policy)], right)
    axes.set_xlabel("computed share of the layer-tokens that could be relayed, per cent")
    axes.set_ylabel(f"mean KL from a full prefill, {report.num_compared} positions, nats")
    axes.set_title(
        f"{report.subject.model}, {report.subject.dtype}: {report.num_relayed} hand-offs, "
        "95 % intervals",
        fontsize=11,
    )
    axes.set_xlim(-2.0, right)
    axes.grid(which="major", alpha=0.3)
    axes.grid(which="minor", alpha=0.12)
    figure.savefig(path, format="png")


def frontier(summaries: Sequence[Summary]) -> list[Summary]:
    """Those that no other one betters at the same or lower cost, the cheapest first."""
    best: list[Summary] = []
    for summary in sorted(summaries, key=lambda s: (s.computed_share, s.kl)):
        if not best or summary.kl < best[-1].kl:
            best.append(summary)
    return best


def _draw_point(axes: Axes, summary: Summary) -> None:
    x, y = 100.0 * summary.computed_share, max(summary.kl, _FLOOR)
    low = max(summary.kl_interval.low, _FLOOR)
    high = max(summary.kl_interval.high, _FLOOR)
    colour = "tab:blue" if is_published(summary.policy) else "tab:red"
    axes.errorbar(
        [x], [y], yerr=[[max(y - low, 0.0)], [max(high - y, 0.0)]], color=colour, fmt="o", capsize=3
    )
    axes.annotate(
        summary.policy, (x, y), xytext=(8, 6), textcoords="offset points", fontsize=9, color=colour
    )


def _draw_frontier(axes: Axes, published: Sequence[Summary], right: float) -> None:
    """Steps: a cost between two policies buys no more than the cheaper one."""
    best = frontier(published)
    if not best:
        return
    axes.step(
        [*(100.0 * summary.computed_share for summary in best), right],
        [max(summary.kl, _FLOOR) for summary in (*best, best[-1])],
        where="post",
        color="tab:blue",
        lw=0.9,
        ls="--",
        label="frontier of the published policies",
    )
    axes.legend(loc="best", fontsize=8)
