"""Draws a profile: the curves that a model's bands were read from, and the bands."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from relaykv.engine.relay_profile import ProfileReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAND_COLOURS = {"inject": "tab:green", "select": "tab:orange", "stop": "tab:red"}


def can_draw() -> bool:
    """Whether matplotlib is installed (the extra `profile`)."""
    return find_spec("matplotlib") is not None


def draw_profile(report: ProfileReport, path: Path) -> None:
    """Writes a picture of two curves over the layers: similarity, and agreement of the ranking.

    Args:
        path: of a PNG file.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    # Imported here: it is an extra. Figures made without pyplot leave no state behind.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 7), dpi=120, layout="constrained")
    similarity, correlation = figure.subplots(2, 1, sharex=True)
    _draw_similarity(similarity, report)
    _draw_correlation(correlation, report)
    bands = report.profile.bands
    figure.suptitle(
        f"Relayed against computed KV: {report.profile.model}, {report.dtype}\n"
        f"{report.num_handoffs} hand-offs, {report.num_tokens} relayed tokens; bands "
        f"inject {bands.inject}, select {bands.select}, stop {bands.stop}",
        fontsize=11,
    )
    correlation.set_xlabel("layer")
    correlation.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, format="png")


def _draw_similarity(axes: Axes, report: ProfileReport) -> None:
    layers = range(report.curves.num_layers)
    axes.plot(
        layers, report.curves.value_similarity, color="tab:blue", marker="o", ms=4, label="values"
    )
    axes.plot(
        layers, report.curves.key_similarity, color="0.6", ls="--", label="keys, moved by the shift"
    )
    axes.axhline(0.99, color="tab:green", lw=0.8, ls=":", label="0.99, the bound of inject")
    axes.set_ylabel("mean cosine similarity")
    _draw_bands(axes, report)
    axes.legend(loc="best", fontsize=8)


def _draw_correlation(axes: Axes, report: ProfileReport) -> None:
    correlation = report.curves.rank_correlation
    axes.plot(
        range(1, len(correlation)),
        correlation[1:],
        color="tab:purple",
        marker="o",
        ms=4,
        label="of token deviations, with the layer below",
    )
    axes.set_ylabel("Spearman rank correlation")
    _draw_bands(axes, report)
    axes.legend(loc="best", fontsize=8)


def _draw_bands(axes: Axes, report: ProfileReport) -> None:
    """Shades where all relayed tokens, then where selected ones are computed again."""
    bands = report.profile.bands
    for name, layer in (("inject", bands.inject), ("select", bands.select), ("stop", bands.stop)):
        axes.axvline(layer, color=_BAND_COLOURS[name], lw=1.2, label=f"{name} {layer}")
    axes.axvspan(bands.inject, bands.select, color="tab:green", alpha=0.12, lw=0)
    axes.axvspan(bands.select, bands.stop, color="tab:orange", alpha=0.08, lw=0)
    axes.grid(alpha=0.25)
