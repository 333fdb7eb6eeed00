"""Plots of single commands (level 4): figure 13, time to the first token against the cached ratio, a line a
prompt length; and figure 7, what workloads are like.

matplotlib is optional; without it ``--plot`` is refused before anything is measured.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memserve.errors import UserError
from memserve.units import NS_PER_S

if TYPE_CHECKING:
    from memserve.bench.results import Shape
    from memserve.runtime.profile import Profile

RATIO_STEPS = 40


def require_matplotlib() -> None:
    """Raise :class:`UserError` when matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib, which is not installed", hint="pip install matplotlib", param="plot")


def plot_profile(profile: Profile, title: str, file: Path) -> None:
    """Draw measured dots and fitted lines into ``file``, whose ending says the format.

    Raises :class:`UserError` for an ending that matplotlib does not know, and where it may not write.
    """
    require_matplotlib()
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")  # no window
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(8, 5.5))
    samples = profile.measured.samples["prefill"]
    for number, length in enumerate(sorted({sample.first + sample.second for sample in samples})):
        dots = [sample for sample in samples if sample.first + sample.second == length]
        ratios = [step / RATIO_STEPS for step in range(RATIO_STEPS)]
        cached = [round(length * ratio) for ratio in ratios]
        fitted = [profile.costs.prefill_ns(length - count, count) / NS_PER_S for count in cached]
        axes.plot(ratios, fitted, color=f"C{number}", label=f"{length} tokens")
        shares = [sample.second / length for sample in dots]
        axes.scatter(shares, [sample.ns / NS_PER_S for sample in dots], color=f"C{number}", s=18)
    axes.set(xlabel="cached ratio", ylabel="time to first token (s)", title=title, yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(title="prompt", loc="lower left", ncols=2)
    _save(figure, file)


def plot_shapes(shapes: Sequence[Shape], file: Path) -> None:
    """Figure 7's form: what workloads are like, a line each. Raises :class:`UserError` as :func:`plot_profile` does."""
    from memserve.bench.serve import draw_shapes

    require_matplotlib()
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")  # no window
    _save(draw_shapes(importlib.import_module("matplotlib.pyplot"), shapes), file)


def _save(figure: Any, file: Path) -> None:
    try:
        figure.savefig(file, bbox_inches="tight", dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot draw {file}: {error}", hint="give a .png, .svg or .pdf file", param="plot") from None
    finally:
        importlib.import_module("matplotlib.pyplot").close(figure)
