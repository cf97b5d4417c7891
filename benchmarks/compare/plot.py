"""The plot of a run, as PNG and SVG: above the times, below how many times as long as farandole each peer takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.compare.jobs import SYSTEMS
from benchmarks.compare.report import short_size
from benchmarks.compare.sweep import Result

__all__ = ["save_plot"]

_LABELS = {"gloo": "Gloo", "openmpi": "Open MPI", "mpich": "MPICH", "intel-mpi": "Intel MPI"}
# Of Okabe and Ito: told apart by all eyes.
_STYLES: dict[str, dict[str, Any]] = {
    "farandole": {"color": "#D55E00", "marker": "o", "linewidth": 2.4, "zorder": 4},
    "farandole-registered": {"color": "#E69F00", "marker": "o", "linewidth": 2.4, "zorder": 4},
    "gloo": {"color": "#0072B2", "marker": "s"},
    "openmpi": {"color": "#009E73", "marker": "^"},
    "mpich": {"color": "#CC79A7", "marker": "D"},
    "intel-mpi": {"color": "#56B4E9", "marker": "v"},
    "copy": {"color": "#777777", "linestyle": ":", "linewidth": 1.2},
}


def save_plot(result: Result, file: Path) -> list[Path]:
    """Write ``file`` with the suffixes .png and .svg; returns both."""
    import matplotlib as mpl  # type: ignore[import-not-found,unused-ignore]

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "farandole", "svg.fonttype": "none", "font.size": 10, "axes.axisbelow": True})
    from matplotlib import pyplot as plt

    collectives = [name for name in result.settings.collectives if any(row.collective == name for row in result.rows)]
    figure, grid = plt.subplots(
        2,
        len(collectives),
        figsize=(max(6.4, 4.6 * len(collectives)), 6.4),
        sharex=True,
        squeeze=False,
        height_ratios=(3, 2),
        layout="constrained",
    )
    for column, collective in enumerate(collectives):
        _draw(result, collective, grid[0][column], grid[1][column])
    grid[0][0].set_ylabel("median time, µs")
    grid[1][0].set_ylabel("time / farandole's")
    machine = result.machine
    figure.suptitle(
        f"{result.settings.ranks} ranks on one host of {machine['cores']} cores, {result.settings.dtype}; "
        f"interleaved in one run",
        fontsize=10,
    )
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    files = [file.with_suffix(".png"), file.with_suffix(".svg")]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return files


def _draw(result: Result, collective: str, times: Any, ratios: Any) -> None:
    rows = [row for row in result.rows if row.collective == collective]
    for name in SYSTEMS:
        own = [row for row in rows if name in row.timings]
        if not own:
            continue
        style = {"linewidth": 1.6, "markersize": 4.5, **_STYLES[name]}
        label = {**_LABELS, "copy": "copying S bytes per rank"}.get(name, name)
        times.plot([row.size for row in own], [row.timings[name].median_s * 1e6 for row in own], label=label, **style)
        both = [row for row in own if "farandole" in row.timings]
        if name != "copy" and both:
            relative = [row.timings[name].median_s / row.timings["farandole"].median_s for row in both]
            ratios.plot([row.size for row in both], relative, **style)
    for axes in (times, ratios):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(visible=True, which="major", color="#DDDDDD")
        axes.spines[["top", "right"]].set_visible(False)
    times.set_title(collective, fontsize=11, loc="left")
    ratios.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ratios.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
    sizes = sorted({row.size for row in rows})
    ratios.set_xticks(sizes[:: -(-len(sizes) // 8)], [short_size(size) for size in sizes[:: -(-len(sizes) // 8)]])
    ratios.set_xticks([], minor=True)
    ratios.set_xlabel("S, bytes")
