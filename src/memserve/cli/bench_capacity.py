"""``memserve bench capacity``: the largest rate that settings bear (level 4)."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from memserve.cli import bench_options as by
from memserve.cli import options as opt
from memserve.cli.load import SloJct, SloTpot, VocabSize, read_slo
from memserve.config import DEFAULT_MODEL
from memserve.errors import UserError

if TYPE_CHECKING:
    from memserve.bench.capacity import Capacity
    from memserve.bench.probing import Search
    from memserve.bench.results import RunFolder
    from memserve.bench.settings import Setting


def capacity(
    workload: Annotated[str, typer.Option(help="What is sent; `memserve bench workload` knows more.")] = "sharegpt",
    settings: Annotated[str, typer.Option(help="Comma-separated, as in `memserve bench serve`.")] = "PD,PD-CC,1P1D-CC",
    instances: by.Instances = 2,
    base_url: by.Servers = None,
    model: opt.Model = DEFAULT_MODEL,
    data: by.Data = None,
    slo_ttft_ms: Annotated[float, typer.Option(min=0, help="Longest time to the first token.")] = 2000.0,
    slo_tpot_ms: SloTpot = None,
    slo_jct_ms: SloJct = None,
    violations_max: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests that may miss the SLO.")
    ] = 0.01,
    start: Annotated[float, typer.Option(min=0.01, help="First rate, in requests a second.")] = 1.0,
    precision: Annotated[float, typer.Option(min=0.001, max=0.5, help="Stop when the rate is known so well.")] = 0.1,
    probe_s: Annotated[float, typer.Option(min=0.1, help="How long requests come at each rate.")] = 30.0,
    prompt_tokens_max: Annotated[int, typer.Option(min=16, help="Cut prompts, history included.")] = 2048,
    output_tokens_max: Annotated[int, typer.Option(min=1, help="Cut answers.")] = 32,
    turns_max: Annotated[int, typer.Option(min=1, help="Cut sessions.")] = 4,
    vocab_size: VocabSize = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the first rate's sample; later rates count on.")] = 0,
    serve_flags: by.ServeFlags = "",
    out: by.Folder = None,
) -> None:
    """Search the largest rate with a bounded queue and a kept SLO, setting by setting, by bisection."""
    from memserve.bench.campaign import default_folder
    from memserve.bench.catalogue import Recipe
    from memserve.bench.load.client import require_aiohttp
    from memserve.bench.load.prompts import Manner
    from memserve.bench.meters import weighing
    from memserve.bench.probing import Search, workload_at
    from memserve.bench.results import RunFolder
    from memserve.bench.settings import named_server, parse_settings
    from memserve.bench.studies import kind_of
    from memserve.workloads.shape import Caps

    require_aiohttp()
    contenders = parse_settings(",".join([settings, *map(named_server, base_url or ())]), instances)
    meter, own_vocab_size = weighing(model if settings.strip() else None)
    caps = Caps(prompt_tokens_max, output_tokens_max, turns_max)
    recipe = Recipe(kind=kind_of(workload), data=data, seed=seed, caps=caps)
    slo = read_slo(slo_ttft_ms, slo_tpot_ms, slo_jct_ms)
    flags = ("--model", model, *shlex.split(serve_flags))
    manner = Manner("", vocab_size or own_vocab_size, ignore_eos=True)
    plan = Search(recipe, slo, violations_max, start, precision, probe_s, flags, manner, meter)
    workload_at(plan, start, seed)  # what is wrong with the data is said before anything is started
    folder = RunFolder(out or default_folder())
    _tell(_search(plan, contenders, folder), plan, folder)


def _search(plan: Search, contenders: Sequence[Setting], folder: RunFolder) -> list[Capacity]:
    """Setting by setting, until one search is ended early."""
    from memserve.bench.capacity import Capacity
    from memserve.bench.load.driver import INTERRUPTED, sigterm_interrupts
    from memserve.bench.probing import search_capacity

    found: list[Capacity] = []
    with sigterm_interrupts():
        for setting in contenders:
            try:
                found.append(search_capacity(plan, setting, folder.writer, lambda line: typer.echo(line, err=True)))
            except KeyboardInterrupt:  # while a server starts; during a probe it is the driver's
                found.append(Capacity(setting.name, None, (), INTERRUPTED))
            except UserError as error:
                if not found:
                    raise
                found.append(Capacity(setting.name, None, (), str(error)))
            if found[-1].partial is not None:
                break
    return found


def _tell(found: list[Capacity], plan: Search, folder: RunFolder) -> None:
    from memserve.bench.capacity_report import write_capacity
    from memserve.bench.report import REPORT

    folder.writer.close()
    write_capacity(found, plan, shlex.join(["memserve", *sys.argv[1:]]), folder.path)
    for one in found:
        told = f"{one.rate:.2f} requests/s" if one.rate is not None else "no rate was borne"
        typer.echo(f"{one.setting}: {told}" + (f" (partial: {one.partial})" if one.partial else ""))
    typer.echo(f"report: {folder.path / REPORT}")
    if found and found[-1].partial is not None:
        raise typer.Exit(1)
