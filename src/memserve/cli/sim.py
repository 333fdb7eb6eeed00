"""``memserve sim``: whole clusters under virtual time (level 4)."""

from __future__ import annotations

import typer

from memserve.cli import sim_fuzz

app = typer.Typer(help="Run whole clusters under virtual time: the production machines, simulated devices.")
app.command("fuzz")(sim_fuzz.fuzz)


@app.callback()
def sim() -> None:
    """Run whole clusters under virtual time: the production machines, simulated devices."""
