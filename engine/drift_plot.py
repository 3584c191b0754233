"""Draws how far policies drift from hop to hop of a chain."""

from __future__ import annotations

from pathlib import Path

from relaykv.engine.chain_report import ChainReport

_FLOOR = 1e-7  # rounding; a logarithm has no zero


def draw_drift(report: ChainReport, path: Path) -> None:
    """Writes a picture of one line for each policy, with 95 % intervals.

    Args:
        path: of a PNG file, whose folder exists.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    # Imported here: it is an extra. Figures made without pyplot leave no state behind.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 5.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.set_yscale("log")
    for place, drift in enumerate(report.drifts):
        kl = [max(value, _FLOOR) for value in drift.kl]
        low = [max(k - max(i.low, _FLOOR), 0.0) for k, i in zip(kl, drift.intervals, strict=True)]
        high = [max(i.high - k, 0.0) for k, i in zip(kl, drift.intervals, strict=True)]
        aside = 0.04 * (place - (len(report.drifts) - 1) / 2)  # intervals stay apart
        hops = [hop + aside for hop in range(1, len(kl) + 1)]
        axes.errorbar(hops, kl, yerr=[low, high], marker="o", ms=4, capsize=2, label=drift.policy)
    axes.set_xlabel("hop")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(f"mean KL from a full prefill, {report.num_compared} positions, nats")
    axes.set_title(
        f"{report.subject.model}, {report.subject.dtype}: {report.num_relayed} chains, "
        "95 % intervals",
        fontsize=11,
    )
    axes.grid(which="major", alpha=0.3)
    axes.grid(which="minor", alpha=0.12)
    axes.legend(loc="best", fontsize=8)
    figure.savefig(path, format="png")
