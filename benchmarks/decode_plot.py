"""The picture of benchmarks/decode.py: latency over batch and context, and where the time went. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decode import Row

STATES = ("compute", "wait_dependency", "wait_memory", "wait_host")
COLOURS = {"compute": "#2a7f62", "wait_dependency": "#e0a030", "wait_memory": "#c65d3b", "wait_host": "#7d7d8c"}
LINES = {"megakernel": "#1f4e9c", "graphs": "#2a7f62", "eager": "#a0522d"}
STYLES = ("-", "--", ":", "-.")


def plot(rows: Sequence[Row], model: str, path: Path) -> None:
    """Write a PNG with two pictures to `path`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    height = max(5.0, 1.5 + 0.28 * len(rows))
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, height), layout="constrained")
    _latency(left, rows)
    _states(right, rows)
    figure.suptitle(f"Decode, shape of {model}, random weights: median of a step, 95 % interval")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _latency(axes: Any, rows: Sequence[Row]) -> None:
    contexts = sorted({row.context for row in rows})
    for backend in dict.fromkeys(row.backend for row in rows):
        for at, context in enumerate(contexts):
            line = sorted((r for r in rows if (r.backend, r.context) == (backend, context)), key=lambda r: r.batch)
            spread = [[r.median - r.low for r in line], [r.high - r.median for r in line]]
            axes.errorbar(
                [r.batch for r in line],
                [r.median for r in line],
                yerr=[[max(v, 0.0) for v in side] for side in spread],
                marker="o",
                capsize=3,
                color=LINES.get(backend),
                linestyle=STYLES[at % len(STYLES)],
                label=f"{backend}, context {context}",
            )
    axes.set(xlabel="batch", ylabel="microseconds a step", xscale="log", ylim=(0, None))
    batches = sorted({r.batch for r in rows})
    axes.set_xticks(batches, [str(batch) for batch in batches], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False)


def _states(axes: Any, rows: Sequence[Row]) -> None:
    names = [f"{r.backend}, batch {r.batch}, context {r.context}" for r in rows]
    left = [0.0] * len(rows)
    for state in STATES:
        widths = [r.states.get(state, 0.0) for r in rows]
        axes.barh(names, widths, left=left, color=COLOURS[state], label=state.replace("_", " "))
        left = [edge + width for edge, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="share of the time on the device", xlim=(0, 1))
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=2, frameon=False)
