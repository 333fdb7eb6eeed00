"""Routes of files and batches: ``/v1/files`` and ``/v1/batches``, as OpenAI has them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from memserve.api.batches.batch import ENDPOINTS, BatchBody, BatchStatus, RequestBatch, window_s
from memserve.api.batches.files import FileLimits, FileStore, FileWriter, StoredFile
from memserve.api.batches.form import FieldBegins, FormParser, boundary_of
from memserve.api.batches.runner import BatchRunner
from memserve.api.http.errors import ApiError, bad_request, too_large
from memserve.api.http.limits import TENANT_KEY, ClientGone, Edge, json_body
from memserve.api.http.middleware import json_page
from memserve.api.http.request import new_id
from memserve.api.metrics.http import ApiMetrics
from memserve.api.openai.request.schema import parse_body
from memserve.base.errors import UserError
from memserve.base.units import KIB, MIB

PURPOSES = ("batch",)
_WRITE_BYTES = MIB
"""Of an upload; as much of it is in memory."""
_READ_BYTES = 256 * KIB
_FIELD_BYTES_MAX = 1024
_FORM_EXTRA_BYTES = 64 * KIB
"""What a form may have beside its file."""
_EXPIRY_S = (3600, 30 * 86_400)
_NAME_CHARS_MAX = 255


def expiry_s(expires_after: dict[str, Any] | None, param: str) -> int | None:
    """Seconds of ``{"anchor": "created_at", "seconds": N}``; None: never. Raises :class:`ApiError` 400."""
    if expires_after is None:
        return None
    seconds = expires_after.get("seconds")
    if isinstance(seconds, str) and seconds.isdecimal() and len(seconds) < 9:
        seconds = int(seconds)
    if (
        expires_after.get("anchor") != "created_at"
        or not isinstance(seconds, int)
        or not _EXPIRY_S[0] <= seconds <= _EXPIRY_S[1]
    ):
        least, most = _EXPIRY_S
        raise bad_request(f"{param} is an anchor, created_at, and {least} to {most} seconds", param, "invalid_value")
    return seconds


class _Upload:
    """One upload while it is read."""

    def __init__(self, store: FileStore, tenant: str) -> None:
        self._store, self._tenant = store, tenant
        self._fields: dict[str, bytearray] = {}
        self._field = ""
        self._buffer = bytearray()
        self._filename = ""
        self._writer: FileWriter | None = None

    async def take_piece(self, piece: FieldBegins | bytes) -> None:
        """Raises :class:`ApiError` for too much of anything."""
        if isinstance(piece, FieldBegins):
            self._field = piece.name
            if piece.name == "file" and self._writer is None:
                self._filename = (piece.filename or "upload")[:_NAME_CHARS_MAX]
                self._writer = self._store.begin_file(self._tenant)
            elif piece.name in self._fields or piece.name == "file" or len(self._fields) >= 8:
                raise bad_request(f"The form has the field {piece.name[:100]!r} twice, or too many fields")
            else:
                self._fields[piece.name] = bytearray()
        elif self._field == "file":
            self._buffer += piece
            if len(self._buffer) >= _WRITE_BYTES:
                await self._write_buffer()
        else:
            value = self._fields[self._field]
            value += piece
            if len(value) > _FIELD_BYTES_MAX:
                raise bad_request(f"The field {self._field[:100]!r} is longer than {_FIELD_BYTES_MAX} bytes")

    async def finish_upload(self) -> StoredFile:
        """Keep the file. Raises :class:`ApiError` 400 where the form lacks something."""
        if self._writer is None:
            raise bad_request("'file' is required: the file itself", "file", "missing_required_parameter")
        fields = {name: value.decode("utf-8", "replace") for name, value in self._fields.items()}
        purpose = fields.pop("purpose", None)
        if purpose not in PURPOSES:
            raise bad_request(f"'purpose' must be one of {', '.join(PURPOSES)}", "purpose", "invalid_value")
        expiry = {name: fields.pop(f"expires_after[{name}]", None) for name in ("anchor", "seconds")}
        if fields:
            raise bad_request(f"unknown field {min(fields)[:100]!r}", min(fields), "unknown_field")
        expires_after_s = expiry_s(expiry if any(expiry.values()) else None, "expires_after")
        await self._write_buffer()
        return await self._writer.finish_file(self._filename, purpose, expires_after_s)

    def abandon_upload(self) -> None:
        """Nothing happens to a file that was kept."""
        if self._writer is not None:
            self._writer.abandon_file()

    async def _write_buffer(self) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        if self._writer is not None and data:
            await self._writer.write_bytes(data)


class FileRoutes:
    """``/v1/files``."""

    def __init__(self, store: FileStore, runner: BatchRunner) -> None:
        self._store, self._runner = store, runner

    def routes(self) -> list[Route]:
        """As the application has them."""
        return [
            Route("/v1/files", self.upload_file, methods=["POST"]),
            Route("/v1/files", self.list_files),
            Route("/v1/files/{file_id}", self.get_file),
            Route("/v1/files/{file_id}", self.delete_file, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", self.get_content),
        ]

    async def upload_file(self, request: Request) -> Response:
        """``POST /v1/files``: a form with ``file`` and ``purpose``, written to disk as it arrives."""
        parser = FormParser(boundary_of(request.headers.get("content-type", "")))
        limit_bytes = self._store.limits.file_bytes_max + _FORM_EXTRA_BYTES
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit_bytes:
            raise too_large(limit_bytes)
        upload = _Upload(self._store, request.scope[TENANT_KEY])
        try:
            nbytes, more = 0, True
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                data, more = message.get("body", b""), message.get("more_body", False)
                nbytes += len(data)
                if nbytes > limit_bytes:
                    raise too_large(limit_bytes)
                for piece in parser.push_bytes(data):
                    await upload.take_piece(piece)
            if not parser.is_complete:
                raise bad_request("The form ends before its last boundary")
            return json_page((await upload.finish_upload()).card())
        except OSError as error:
            why = f"The file cannot be kept: {error.strerror or error}"
            raise ApiError(503, why, kind="server_error", code="not_durable") from None
        finally:
            upload.abandon_upload()

    async def list_files(self, request: Request) -> Response:
        """``GET /v1/files``: the tenant's own, newest first."""
        purpose, tenant = request.query_params.get("purpose"), request.scope[TENANT_KEY]
        files = [file for file in self._store.list_files(tenant) if purpose in (None, file.purpose)]
        return json_page(_page(request, [(file.file_id, file.card) for file in files], 10_000, 10_000))

    async def get_file(self, request: Request) -> Response:
        """``GET /v1/files/{id}``."""
        return json_page(self._find_file(request).card())

    async def delete_file(self, request: Request) -> Response:
        """``DELETE /v1/files/{id}``. Raises :class:`ApiError` 400 while a batch reads or writes it."""
        record = self._find_file(request)
        if self._runner.uses_file(record.file_id):
            message = "A batch that has not ended needs this file: cancel the batch first"
            raise bad_request(message, "file_id", "file_in_use")
        self._store.delete_file(record.tenant, record.file_id)
        return json_page({"id": record.file_id, "object": "file", "deleted": True})

    async def get_content(self, request: Request) -> Response:
        """``GET /v1/files/{id}/content``: the bytes."""
        record = self._find_file(request)
        length = {"content-length": str(record.nbytes)}
        pieces = _pieces(self._store.path_of(record.file_id), record.nbytes)
        return StreamingResponse(pieces, headers=length, media_type="application/octet-stream")

    def _find_file(self, request: Request) -> StoredFile:
        return self._store.get_file(request.scope[TENANT_KEY], request.path_params["file_id"])


async def _pieces(path: Path, nbytes: int) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while nbytes and (piece := await asyncio.to_thread(file.read, min(_READ_BYTES, nbytes))):
            nbytes -= len(piece)
            yield piece


class BatchRoutes:
    """``/v1/batches``."""

    def __init__(self, store: FileStore, runner: BatchRunner, edge: Edge) -> None:
        self._store, self._runner, self._edge = store, runner, edge

    def routes(self) -> list[Route]:
        """As the application has them."""
        return [
            Route("/v1/batches", self.create_batch, methods=["POST"]),
            Route("/v1/batches", self.list_batches),
            Route("/v1/batches/{batch_id}", self.get_batch),
            Route("/v1/batches/{batch_id}/cancel", self.cancel_batch, methods=["POST"]),
        ]

    async def create_batch(self, request: Request) -> Response:
        """``POST /v1/batches``."""
        tenant = request.scope[TENANT_KEY]
        async with json_body(request.scope, request.receive, self._edge) as data:
            body = parse_body(data, BatchBody)
        if body.endpoint not in ENDPOINTS:
            raise bad_request(f"endpoint is one of {', '.join(ENDPOINTS)}", "endpoint", "invalid_value")
        file = self._store.get_file(tenant, body.input_file_id)
        if file.purpose != "batch":
            raise bad_request("The input file must have the purpose 'batch'", "input_file_id", "invalid_value")
        now_s = int(time.time())
        batch = RequestBatch(
            f"batch_{new_id()}", tenant, body.endpoint, file.file_id, body.completion_window, now_s,
            now_s + window_s(body.completion_window), f"file-{new_id()}", f"file-{new_id()}", body.metadata,
            expiry_s(body.output_expires_after, "output_expires_after"),
        )  # fmt: skip
        return json_page(self._runner.card(await self._runner.create_batch(batch)))

    async def list_batches(self, request: Request) -> Response:
        """``GET /v1/batches``: the tenant's own, newest first."""
        batches = self._runner.list_batches(request.scope[TENANT_KEY])
        items = [(batch.batch_id, lambda batch=batch: self._runner.card(batch)) for batch in batches]
        return json_page(_page(request, items, 20, 100))

    async def get_batch(self, request: Request) -> Response:
        """``GET /v1/batches/{id}``."""
        batch = self._runner.get_batch(request.scope[TENANT_KEY], request.path_params["batch_id"])
        return json_page(self._runner.card(batch))

    async def cancel_batch(self, request: Request) -> Response:
        """``POST /v1/batches/{id}/cancel``."""
        tenant, batch_id = request.scope[TENANT_KEY], request.path_params["batch_id"]
        return json_page(self._runner.card(await self._runner.cancel_batch(tenant, batch_id)))


_Items = Sequence[tuple[str, Callable[[], dict[str, Any]]]]


def _page(request: Request, items: _Items, usual: int, most: int) -> dict[str, Any]:
    """A page of ``items``, oldest first: ids and cards. Raises :class:`ApiError` 400 for wrong parameters."""
    query = request.query_params
    limit_text, order, after = query.get("limit", str(usual)), query.get("order", "desc"), query.get("after")
    if not (limit_text.isdecimal() and len(limit_text) < 9 and 1 <= int(limit_text) <= most):
        raise bad_request(f"limit is a number from 1 to {most}", "limit", "invalid_value")
    if order not in ("asc", "desc"):
        raise bad_request("order is asc or desc", "order", "invalid_value")
    items = list(items) if order == "asc" else list(items)[::-1]
    ids = [item_id for item_id, _ in items]
    if after is not None and after not in ids:
        raise bad_request("after is the id of a listed object", "after", "invalid_value")
    first = 0 if after is None else ids.index(after) + 1
    page = items[first : first + int(limit_text)]
    return {
        "object": "list",
        "data": [card() for _, card in page],
        "first_id": page[0][0] if page else None,
        "last_id": page[-1][0] if page else None,
        "has_more": first + len(page) < len(items),
    }


def batch_families(
    by_status: Counter[str], running: int, waiting: int, limit: int, results: Counter[str]
) -> Iterator[Metric]:
    """What ``/metrics`` says of batches, and of their requests: how many run and wait, how many may run, and how many
    had which end."""
    batches = GaugeMetricFamily("memserve_batches", "Batches that are remembered, by status", labels=["status"])
    for status in BatchStatus:
        batches.add_metric([status.value], by_status[status.value])
    yield batches
    about = "Requests of batches that have no answer, by whether they run"
    requests = GaugeMetricFamily("memserve_batch_requests_open", about, labels=["state"])
    requests.add_metric(["running"], running)
    requests.add_metric(["waiting"], waiting)
    yield requests
    about = "Requests of batches that may run at once, beside interactive ones"
    yield GaugeMetricFamily("memserve_batch_requests_limit", about, value=limit)
    ends = CounterMetricFamily("memserve_batch_requests", "Requests of batches by how they ended", labels=["result"])
    for result in ("completed", "failed", "expired"):
        ends.add_metric([result], results[result])
    yield ends


class BatchMetrics:
    """Reads them for ``/metrics``."""

    def __init__(self, runner: BatchRunner) -> None:
        self._runner = runner

    def collect(self) -> Iterator[Metric]:
        """The families."""
        runner, pace = self._runner, self._runner.pace
        yield from batch_families(
            runner.count_by_status(), pace.in_flight, runner.count_waiting(), pace.limit, runner.results
        )


def open_batches(
    folder: Path | None, edge: Edge, count_waiting: Callable[[], int], app: ASGIApp, metrics: Sequence[ApiMetrics]
) -> tuple[BatchRunner | None, list[Route]]:
    """Files and batches in ``folder``, and their routes; none without one. ``app`` answers the requests of batches;
    ``count_waiting``: as of :class:`BatchRunner`; ``metrics``: where the first tokens of clients are told.

    Raises :class:`UserError` where the folder cannot be used."""
    if folder is None:
        return None, []
    limits = FileLimits(edge.limits.file_bytes_max, edge.limits.file_storage_bytes)
    try:
        store = FileStore(folder / "files", limits)
        runner = BatchRunner(folder / "records", store, app, count_waiting, edge.limits.body_bytes_max)
    except OSError as error:
        message = f"files and batches cannot be kept in {folder}: {error.strerror}"
        raise UserError(message, hint="give another folder, --metadata PATH, or none", param="metadata") from None
    edge.metrics.registry.register(BatchMetrics(runner))
    for part in metrics:
        part.on_interactive_token = runner.note_interactive
    return runner, [*FileRoutes(store, runner).routes(), *BatchRoutes(store, runner, edge).routes()]


def waiting_of(stats: Any) -> int:
    """Requests that wait in front of instances, or in an engine's queue."""
    cluster = getattr(stats, "cluster", None)
    if cluster is None:
        return int(stats.instance.requests_waiting)
    return int(cluster.requests_unplaced + sum(member.view.load.requests_waiting for member in stats.members))
