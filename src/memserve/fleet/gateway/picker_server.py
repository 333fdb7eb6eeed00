"""The gRPC server of the endpoint picker: external processing and health, in the event loop of the HTTP server.

It starts when the application behind it has, and ends before it: requests that gateways have under way are waited for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import add_ExternalProcessorServicer_to_server
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from starlette.types import Receive, Scope, Send

from memserve.api.http.server import DrainedApp
from memserve.api.http.tls import Tls
from memserve.base.errors import UserError
from memserve.base.units import MIB
from memserve.fleet.gateway.picker import Picker

log = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS, READINESS = "liveness", "readiness"
HEALTH_EVERY_S = 0.5
"""How soon gateways that watch the health hear of it."""
END_S = 1.0
"""For streams that are cut off at the end, to be told so."""


@dataclass(frozen=True, slots=True)
class PickerAddress:
    """Where gateways find a picker."""

    host: str
    port: int
    tls: Tls | None = None
    """The certificate of the HTTP server, which is this one's, too."""

    @property
    def text(self) -> str:
        """``HOST:PORT``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PickerServer:
    """One server for all gateways."""

    def __init__(self, picker: Picker, address: PickerAddress, drain_s: float, *, runs_host: bool = False) -> None:
        """``drain_s``: how long requests may go on when it ends. ``runs_host``: the picker's host starts and ends with
        it; else it runs already."""
        self._picker, self._address, self._drain_s, self._runs_host = picker, address, drain_s, runs_host
        self._server: Any = None
        self._health: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._drains_since_s: float | None = None

    async def start(self) -> None:
        """Listen. Raises :class:`UserError` where that is impossible."""
        limits = self._picker.edge.limits
        options = [
            ("grpc.so_reuseport", 0),  # else a port in use would not be noticed
            ("grpc.max_receive_message_length", limits.body_bytes_max + MIB),
            ("grpc.max_send_message_length", limits.body_bytes_max + MIB),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=limits.connections_max)
        self._health = health.aio.HealthServicer()
        add_ExternalProcessorServicer_to_server(_Processor(self._picker), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        # before the port is open: the first watcher must not hear that nothing is known
        await self._report_health()
        try:
            self._listen()
        except RuntimeError:
            hint = "choose another one with --endpoint-picker HOST:PORT"
            raise UserError(f"cannot listen on {self._address.text}", hint=hint, param="endpoint_picker") from None
        await self._server.start()
        self._tasks.append(asyncio.create_task(self._keep_reporting()))
        if self._runs_host:  # apart: it asks this server, which answers when it has started
            self._tasks.append(asyncio.create_task(self._picker.host.start()))

    def _listen(self) -> None:
        if self._address.tls is None:
            self._server.add_insecure_port(self._address.text)
            return
        configuration = _Certificates(self._address.tls)
        credentials = grpc.dynamic_ssl_server_credentials(configuration.current(), configuration.changed)
        self._server.add_secure_port(self._address.text, credentials)

    def begin_drain(self) -> None:
        """Give no request an endpoint any more."""
        self._picker.draining = True
        self._drains_since_s = time.monotonic()

    async def stop(self) -> None:
        """Wait for the requests that are under way, and end."""
        if self._server is None:
            return
        self._picker.draining = True
        for task in self._tasks:
            task.cancel()
        # watchers look elsewhere from now on, while what is under way here goes on
        await self._report_health()
        waited_s = 0.0 if self._drains_since_s is None else time.monotonic() - self._drains_since_s
        # what has passed since the signal counts: the whole end takes one drain
        await self._server.stop(max(END_S, self._drain_s - waited_s))
        if self._runs_host:
            await self._picker.host.close()

    async def _keep_reporting(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            await self._report_health()

    async def _report_health(self) -> None:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if self._picker.is_ready else statuses.NOT_SERVING
        for service in ("", READINESS, SERVICE):
            await self._health.set(service, status)
        await self._health.set(LIVENESS, statuses.SERVING)


class _Processor:
    """What gRPC calls."""

    def __init__(self, picker: Picker) -> None:
        self._picker = picker

    async def Process(self, messages: Any, context: Any) -> None:
        """One stream of a gateway."""
        await self._picker.answer_stream(aiter(messages), context.write, context.peer().rpartition(":")[0])


class _Certificates:
    """Those of the HTTP server, as gRPC wants them."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._pair: tuple[bytes, bytes] = b"", b""

    def current(self) -> Any:
        """As they are."""
        cert, key = (path.read_bytes() for path in self._tls.files)
        self._pair = key, cert
        return grpc.ssl_server_certificate_configuration([self._pair])

    def changed(self) -> Any | None:
        """For a new connection. None: what it had is right."""
        with suppress(OSError, UserError):
            self._tls.current_context()  # raises for files that are no pair
            before, configuration = self._pair, self.current()
            return configuration if self._pair != before else None
        return None


class WithPicker:
    """An application, and a picker that lives as long as it does."""

    def __init__(self, app: DrainedApp, server: PickerServer) -> None:
        self._app, self._server, self.state = app, server, app.state
        #: why the picker could not start
        self.failure: UserError | None = None

    def begin_drain(self) -> None:
        """The server is about to end: no request gets an endpoint any more."""
        self._server.begin_drain()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return

        async def receive_event() -> Any:
            event = await receive()
            # the picker first: what gateways have under way needs the application's engines
            if event["type"] == "lifespan.shutdown":
                await self._server.stop()
            return event

        async def send_event(event: Any) -> None:
            # behind the application: gateways may ask as soon as the port is open
            if event["type"] == "lifespan.startup.complete":
                try:
                    await self._server.start()
                except UserError as error:
                    self.failure = error
                    event = {"type": "lifespan.startup.failed", "message": str(error)}
            await send(event)

        await self._app(scope, receive_event, send_event)
