"""``/engines``: which engines a fleet has; one joins, one leaves. It has a key of its own: what joins reads prompts."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from memserve.api.auth import KeyRing
from memserve.api.errors import ApiError, bad_request
from memserve.fleet.words import EngineView, read_engine
from memserve.runtime.fleet import FleetHost
from memserve.runtime.private_files import Followed

BODY_BYTES_MAX = 4096


class _Join(msgspec.Struct):
    engine: str


class Engines:
    """The routes below ``/engines``."""

    def __init__(self, host: FleetHost, key: str | Followed[str] | None) -> None:
        """``key`` None: engines are those of the command line."""
        self._host = host
        if key is None:
            self._keys = KeyRing()
        else:
            followed = key if isinstance(key, Followed) else Followed.fixed(key)
            self._keys = KeyRing(followed.then(lambda key: (f"operator={key}",)))

    def routes(self) -> list[Route]:
        """For the application."""
        return [
            Route("/engines", self.show, methods=["GET"]),
            Route("/engines", self.join, methods=["POST"]),
            Route("/engines/{name}", self.leave, methods=["DELETE"]),
        ]

    def _check(self, request: Request) -> None:
        if self._keys.is_open:
            message = "Engines join and leave where `memserve serve` has --engine-admin-key-file"
            raise ApiError(403, message, code="engines_are_fixed")
        self._keys.tenant(request.headers.get("authorization"))

    async def show(self, request: Request) -> Response:
        """All of them, and how they are."""
        self._check(request)
        return _page({"engines": [_told(view) for view in self._host.machine.engines()]})

    async def join(self, request: Request) -> Response:
        """``{"engine": "vllm=http://HOST:PORT,..."}``, as ``--engine`` has it. Says how it is at once."""
        self._check(request)
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_BYTES_MAX:
                raise bad_request("The body of a join is an engine, and short", "engine")
        try:
            spec = read_engine(msgspec.json.decode(body, type=_Join).engine)
        except msgspec.DecodeError:
            raise bad_request('Send {"engine": "vllm=http://HOST:PORT"}', "engine") from None
        await self._host.join_engine(spec)
        view = next((view for view in self._host.machine.engines() if view.name == spec.name), None)
        return _page(_told(view) if view is not None else {"name": spec.name, "up": False})

    async def leave(self, request: Request) -> Response:
        """It gets no new requests, and is gone when its last one has ended."""
        self._check(request)
        name = request.path_params["name"]
        self._host.leave_engine(name)
        view = next((view for view in self._host.machine.engines() if view.name == name), None)
        return _page({"name": name, "requests_open": view.requests_open if view is not None else 0})


def _told(view: EngineView) -> dict[str, object]:
    return {
        "name": view.name,
        "kind": view.kind,
        "up": view.up,
        "models": view.models,
        "requests_open": view.requests_open,
        "cached_blocks": view.cached_blocks,
    }


def _page(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
