"""``memserve ui``: the dashboard of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def ui(
    folder: Annotated[Path, typer.Argument(help="What bench serve or sim run has written with --out.")],
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0: any free one.")] = 8001,
) -> None:
    """Show a finished run in the dashboard, with a slider over its time. Ctrl-C ends it."""
    from memserve_lab.bench.playback import open_runs, serve_runs

    runs = open_runs(folder)
    from memserve.api.http.server import bind

    with bind(host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        typer.echo(f"{len(runs)} run{'s' if len(runs) > 1 else ''}: http://{shown}:{listener.getsockname()[1]}/ui")
        serve_runs(runs, listener)
