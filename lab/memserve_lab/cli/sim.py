"""``memserve sim``: whole clusters under virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memserve_lab.cli import sim_fuzz, sim_run, sim_search
from memserve_lab.cli import sim_studies as sim_agents
from memserve_lab.cli import sim_studies as sim_layerkv
from memserve_lab.cli import sim_studies as sim_memserve
from memserve_lab.cli import sim_studies as sim_paging
from memserve_lab.cli import sim_studies as sim_ratios
from memserve_lab.cli import sim_studies as sim_routers
from memserve_lab.cli import sim_studies as sim_thrash
from memserve_lab.cli.bench_load import command

app = typer.Typer(
    help="Run whole clusters under virtual time: the production machines, simulated devices.", rich_markup_mode=None
)
app.command("run")(sim_run.run)
app.command("compare")(sim_search.compare)
app.command("search")(sim_search.search)
app.command("fuzz")(sim_fuzz.fuzz)
app.command("thrash")(sim_thrash.thrash)
app.command("agents")(sim_agents.agents)
app.command("layerkv")(sim_layerkv.layerkv)
app.command("memserve")(sim_memserve.memserve)
app.command("paging")(sim_paging.paging)
app.command("routers")(sim_routers.routers)
app.command("ratios")(sim_ratios.ratios)


@app.callback(invoke_without_command=True)
def sim(
    context: typer.Context,
    scenario: Annotated[str | None, typer.Option(help="Run an experiment by its name, and print its tables.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the tables of --scenario.")] = None,
) -> None:
    """Run whole clusters under virtual time: the production machines, simulated devices."""
    if scenario is None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())
            raise typer.Exit(2)
        return
    from memserve_lab.bench.study import RunFolder
    from memserve_lab.experiments.llm_serving_cache import open_scenario

    study = open_scenario(scenario, command())
    folder = None if out is None else RunFolder(out)
    study.run_study(lambda line: None)
    for number, table in enumerate(study.make_tables()):
        typer.echo("\n".join([*([""] if number else []), *table.terminal_lines()]))
    if folder is not None:
        study.write_report(folder.path)
