"""``memserve sim``: whole clusters under virtual time."""

from __future__ import annotations

from typing import Annotated

import typer

from memserve.cli import sim_fuzz, sim_run, sim_search

app = typer.Typer(
    help="Run whole clusters under virtual time: the production machines, simulated devices.", rich_markup_mode=None
)
app.command("run")(sim_run.run)
app.command("compare")(sim_search.compare)
app.command("search")(sim_search.search)
app.command("fuzz")(sim_fuzz.fuzz)


@app.callback(invoke_without_command=True)
def sim(
    context: typer.Context,
    scenario: Annotated[str | None, typer.Option(help="Run an experiment by its name, and print its tables.")] = None,
) -> None:
    """Run whole clusters under virtual time: the production machines, simulated devices."""
    if scenario is None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())
            raise typer.Exit(2)
        return
    from memserve.sim.scenarios import run_scenario, text_of

    for number, table in enumerate(run_scenario(scenario)):
        typer.echo("\n".join([*([""] if number else []), *text_of(table)]))
