"""``memserve profile``: what prefill, decode, swaps and transfers cost on this machine."""

from __future__ import annotations

import importlib
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memserve.base.config import EngineOptions
from memserve.base.errors import UserError
from memserve.base.types import check_link
from memserve.base.units import MIB, NS_PER_MS, NS_PER_S, NS_PER_US, human_bytes
from memserve.cli import flags as opt
from memserve.cli.output import progress_bar

if TYPE_CHECKING:
    from memserve.base.types import KVGeometry
    from memserve.host.profile_file import Profile
    from memserve.kv.costs import Quality

RATIO_STEPS = 40
BUSY_ERROR = 0.12
"""Median error of predicted prompt times above which the measurement is not to be trusted."""
PROFILED = EngineOptions(dram_memory_bytes=128 * MIB)
"""The measured engine has a second tier, so that there is something to swap."""
ProfiledEngine = Annotated[
    EngineOptions, opt.Only("model", "dtype", "device", "kv_memory_bytes", "kv_dtype", "threads", "block_tokens")
]


@opt.grouped
def profile(
    *,
    engine: ProfiledEngine = PROFILED,
    seconds: Annotated[float, typer.Option(min=1, help="Approximate seconds to measure.")] = 60.0,
    link: Annotated[
        str,
        typer.Option(
            help="--link of the instances: nixl, and trusted where there is RDMA, has NIXL measured for other hosts."
        ),
    ] = "auto",
    save: Annotated[bool, typer.Option(help="Save the profile in the cache folder, for serve and instance.")] = True,
    even_if_busy: Annotated[
        bool, typer.Option("--even-if-busy", help="Save the profile even if other programs used the machine meanwhile.")
    ] = False,
    plot: Annotated[str | None, typer.Option(help="Draw TTFT against the cached ratio into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Measure prefill, decode, swap and transfer on this machine, and fit the cost model that decides between them."""
    if plot is not None:
        require_matplotlib()
    from memserve.host.profile_file import profile_values
    from memserve.system.process import CpuWatch, busy_note, measure_busy_cores

    if (note := busy_note(measure_busy_cores())) is not None:
        _print_line(f"warning: {note}")
    started, watch = time.perf_counter(), CpuWatch()
    check_link(link)
    fitted_profile, geometry, path = _measure(engine, seconds, link)
    values = profile_values(fitted_profile, geometry) | {"seconds": round(time.perf_counter() - started, 1)}
    others_cores = watch.others_cores()
    values["others_cores"] = None if others_cores is None else round(others_cores, 2)
    values["busy"] = busy_note(others_cores) or _why_untrusted(fitted_profile)
    if save and (even_if_busy or values["busy"] is None):
        from memserve.host.profile_file import save_profile

        save_profile(path, values)
        values["saved"] = str(path)
    if plot is not None:
        plot_profile(fitted_profile, f"{values['model'].split(':')[0]} on {values['machine']}", Path(plot))
        values["plot"] = plot
    typer.echo(json.dumps(values) if as_json else "\n".join(_text(fitted_profile, geometry, values)))


def _why_untrusted(fitted_profile: Profile) -> str | None:
    """Why the curves cannot be trusted although no other program was busy; ``None``: they can."""
    error = fitted_profile.quality["prefill"].median_error
    return f"predicted prompt times are off by {error:.0%}: the machine's speed changed" if error > BUSY_ERROR else None


def _measure(options: EngineOptions, seconds: float, link: str) -> tuple[Profile, KVGeometry, Path]:
    from memserve.host.profile import (
        LINKS,
        NIXL_LINKS,
        SHARES,
        fit_profile,
        measure_steps,
        open_profiler,
        with_transfers,
    )
    from memserve.host.profile_file import machine_name, model_name, profile_path
    from memserve.transport.data_port import uses_nixl

    _print_line(f"loading {options.model} ...")
    with progress_bar("loading"):
        model, config, profiler = open_profiler(options)
    geometry, device = model.geometry, model.device.type
    with progress_bar("measuring", seconds):
        try:
            measured = measure_steps(profiler, config, geometry, seconds, _print_line)
        finally:
            profiler.close()
        links = NIXL_LINKS if uses_nixl(link, None) else LINKS
        measured = with_transfers(measured, geometry, SHARES["transfer"] * seconds, _print_line, links)
    model_key = (model.fingerprint, geometry, device, options.threads)
    fitted_profile = fit_profile(measured, machine_name(device), f"{model.name}: {model_name(*model_key)}")
    return fitted_profile, geometry, profile_path(*model_key)


def _text(fitted_profile: Profile, geometry: KVGeometry, values: dict[str, Any]) -> list[str]:
    from memserve.host.profile_file import EXAMPLE_TOKENS

    costs = fitted_profile.costs
    lines = [f"{values['model']}", f"on {values['machine']}", ""]
    for name, formula in (
        ("prefill", f"{_ms(costs.prefill.step_ns)} + {_us(costs.prefill.token_ns)} per new token + "
                    f"{costs.prefill.pair_ns:.2f} ns per attended pair"),
        ("decode", f"{_ms(costs.decode.step_ns)} + {_us(costs.decode.row_ns)} per sequence + "
                   f"{costs.decode.context_ns:.1f} ns per attended token"),
        *((name, _copy_formula(getattr(costs, name))) for name in ("swap_in", "swap_out", "same_host", "network")),
    ):  # fmt: skip
        lines.append(f"{name:<10} {formula:<72} {_quality(fitted_profile.quality.get(name))}")
    lines += [f"{name}: {why}" for name, why in fitted_profile.measured.failures.items()]
    lines += ["", "moving a cached prefix is quicker than computing it again"]
    for way, tokens in values["pays_from_tokens"].items():
        lines.append(f"  {way:<18} {'never' if tokens is None else f'from {tokens} tokens on'}")
    lines += ["", f"a prompt of {EXAMPLE_TOKENS} tokens with its first half"]
    lines += [f"  {place:<18} {reason}" for place, reason in values["decisions"].items()]
    if values["busy"] is not None:
        lines += ["", f"not to be trusted: {values['busy']}; measure again when the machine is idle"]
        lines += [] if "saved" in values else ["not saved (--even-if-busy saves it anyway)"]
    if "saved" in values:
        lines += ["", f"saved: {values['saved']} ({values['seconds']} s)"]
    return lines


def _quality(quality: Quality | None) -> str:
    if quality is None:
        return "not measured: conservative default"
    errors = f"median {quality.median_error:.1%}, worst {quality.worst_error:.1%}"
    return f"{quality.samples:>3} points; off by {errors} where left out of the fit"


def _copy_formula(curve: Any) -> str:
    rate = f"{human_bytes(round(1e9 / curve.byte_ns))}/s" if curve.byte_ns else "bytes cost nothing"
    return f"{_ms(curve.start_ns)} + {_us(curve.piece_ns)} per piece, {rate}"


def _ms(ns: float) -> str:
    return f"{ns / NS_PER_MS:.3f} ms"


def _us(ns: float) -> str:
    return f"{ns / NS_PER_US:.2f} us"


def require_matplotlib() -> None:
    """Raise :class:`UserError` when matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib, which is not installed", hint="pip install matplotlib", param="plot")


def save_plot(draw: Callable[[Any], Any], file: Path) -> None:
    """Save the figure that ``draw(pyplot)`` returns; the suffix of ``file`` sets the format.

    Raises :class:`UserError` for a suffix that matplotlib does not know, and for a file that cannot be written.
    """
    require_matplotlib()
    importlib.import_module("matplotlib").use("Agg")  # no window
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure = draw(pyplot)
    try:
        figure.savefig(file, bbox_inches="tight", dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot draw {file}: {error}", hint="give a .png, .svg or .pdf file", param="plot") from None
    finally:
        pyplot.close(figure)


def plot_profile(profile: Profile, title: str, file: Path) -> None:
    """MemServe's figure 13: time to the first token against the cached ratio, a line per prompt length; dots are
    measured. Raises as :func:`save_plot`."""
    save_plot(lambda pyplot: _draw_figure(pyplot, profile, title), file)


def _draw_figure(pyplot: Any, profile: Profile, title: str) -> Any:
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
    return figure


def _print_line(line: str) -> None:
    typer.echo(line, err=True)
