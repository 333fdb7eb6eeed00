"""The page before finished runs: its files, and the snapshots of each run."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from memserve.api.errors import ApiError
from memserve.api.guard import on_http_error
from memserve.api.ui.pages import static_file


class Run(Protocol):
    """A finished run."""

    def snapshots(self) -> list[dict[str, Any]]:
        """At even distances, in the form of ``/ui/snapshot``."""


def serve_runs(runs: Mapping[str, Run], listener: socket.socket) -> None:
    """Serve them until a signal ends the process."""
    config = uvicorn.Config(recorded_app(runs), log_level="warning", lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


def recorded_app(runs: Mapping[str, Run]) -> Starlette:
    """``/ui`` for ``runs`` by name. It needs no key."""
    names = tuple(runs)

    async def page(request: Request) -> Response:
        return static_file("index.html", is_recorded=True)

    async def file(request: Request) -> Response:
        try:
            return static_file(request.path_params["name"])
        except ApiError:
            raise HTTPException(404) from None

    async def listed(request: Request) -> Response:
        return Response(msgspec.json.encode(names), media_type="application/json")

    @cache
    def encoded(number: int) -> bytes:
        return msgspec.json.encode(runs[names[number]].snapshots())

    async def run(request: Request) -> Response:
        number = request.path_params["number"]
        if number >= len(names):
            raise HTTPException(404)
        return Response(encoded(number), media_type="application/json")

    return Starlette(
        routes=[
            Route("/ui", page),
            Route("/ui/runs", listed),
            Route("/ui/runs/{number:int}", run),
            Route("/ui/{name}", file),
        ],
        exception_handlers={HTTPException: on_http_error},
    )
