"""Routes by which LoRA adapters come and go while the server runs: vLLM's ``/v1/load_lora_adapter`` and
``/v1/unload_lora_adapter``, with its words for what goes wrong, and SageMaker's ``/adapters``.

An adapter has its name when all instances have loaded it, and before that nothing has changed. Names are this server's,
and what they lead to is named by the content of its files: a name that leads to other files has other KV.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from memserve.api.http.errors import ApiError, bad_request, echo, engine_silent
from memserve.api.http.limits import TENANT_KEY, Edge, json_body
from memserve.api.http.middleware import KeyRing
from memserve.api.openai.interfaces import AdaptingEngine, FollowingEngine, ModelNames, ServingEngine
from memserve.api.openai.paths import owner_url
from memserve.api.openai.request.schema import Body, ShortText, parse_body
from memserve.base.errors import UserError
from memserve.model.loading.lora import CONFIG, Adapter, AdapterConfig, read_adapter
from memserve.protocol.events import AdapterNamesChanged
from memserve.protocol.messages import AdapterFiles

ANSWERED_WITHIN_S = 330.0
"""Longer than instances have to load an adapter."""
NAMES_MAX = 4096


class LoadAdapterBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /v1/load_lora_adapter``."""

    lora_name: ShortText = ""
    """The name by which requests ask for it, as for a model."""
    lora_path: ShortText = ""
    """The folder that PEFT has written: below that of `--lora-folder`, or relative to it."""
    load_inplace: bool = False
    """Let a name that there is lead to these files from now on."""
    model: ShortText | None = None
    """Of a server with several models: the one that it is for. Default: the first."""
    is_3d_lora_weight: bool = False
    """vLLM's, for experts: it has no effect."""


class UnloadAdapterBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: ShortText = ""
    """The adapter's name."""
    model: ShortText | None = None
    """Of a server with several models: the one that it is for. Default: the first."""
    lora_int_id: int | None = None
    """vLLM's: it has no effect."""


class SageMakerAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /adapters``."""

    name: ShortText = ""
    """As `lora_name` of `/v1/load_lora_adapter`."""
    src: ShortText = ""
    """As `lora_path`."""
    load_inplace: bool = False
    """As there."""


class AdapterRoutes:
    """The handlers. One call after the other: each sees the names that the last one has left."""

    def __init__(
        self, engine: ServingEngine, names: ModelNames, folder: Path | None, edge: Edge, keys: KeyRing,
        operators: KeyRing,
    ) -> None:  # fmt: skip
        """``folder``: adapters lie below it; None: they are those of the start. ``operators``: one of these keys is
        needed; none: one of ``keys``."""
        self._engine, self._names, self._edge = engine, names, edge
        self._folder = None if folder is None else folder.expanduser().resolve()
        self._keys = keys if operators.is_open else operators
        self._lock = asyncio.Lock()
        if owner_url(engine) is not None and isinstance(engine, FollowingEngine):
            engine.follow_names(self._follow_names)
        elif isinstance(engine, AdaptingEngine):
            self._restore_names(engine)

    def _follow_names(self, names: AdapterNamesChanged) -> None:
        self._names.replace_adapters(map(_adapter_of, names.adapters), names.unnamed)

    def _restore_names(self, engine: AdaptingEngine) -> None:
        for files in engine.stored_adapters():
            if self._folder is None:  # instances could not load them
                engine.unload_adapter(files.name)
            else:
                self._names.put_adapter(_adapter_of(files))

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/v1/load_lora_adapter", self.load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload_adapter, methods=["POST"]),
            Route("/adapters", self.load_for_sagemaker, methods=["POST"]),
            Route("/adapters/{name:path}", self.unload_for_sagemaker, methods=["DELETE"]),
        ]

    async def load_adapter(self, request: HttpRequest) -> Response:
        """``POST /v1/load_lora_adapter``: 200 when all instances have it."""
        body = await self._read_body(request, LoadAdapterBody)
        return await self._load(body.lora_name, body.lora_path, replaces=body.load_inplace)

    async def unload_adapter(self, request: HttpRequest) -> Response:
        """``POST /v1/unload_lora_adapter``: new requests do not find it; those that run go on."""
        body = await self._read_body(request, UnloadAdapterBody)
        return await self._unload(body.lora_name)

    async def load_for_sagemaker(self, request: HttpRequest) -> Response:
        """``POST /adapters``."""
        body = await self._read_body(request, SageMakerAdapterBody)
        return await self._load(body.name, body.src, replaces=body.load_inplace)

    async def unload_for_sagemaker(self, request: HttpRequest) -> Response:
        """``DELETE /adapters/{name}``."""
        self._check_key(request)
        return await self._unload(request.path_params["name"])

    def _check_key(self, request: HttpRequest) -> None:
        """Raises :class:`ApiError` 401, and 404 where adapters are those of the start."""
        request.scope[TENANT_KEY] = self._keys.tenant_of(request.headers.get("authorization"))
        if self._folder is None or not isinstance(self._engine, AdaptingEngine):
            message = "adapters do not come and go here: start the server with --lora-folder"
            raise ApiError(404, message, code="adapters_are_fixed")

    async def _read_body(self, request: HttpRequest, kind: type[Body]) -> Body:
        self._check_key(request)
        async with json_body(request.scope, request.receive, self._edge) as data:
            return parse_body(data, kind)

    async def _load(self, name: str, path: str, *, replaces: bool) -> Response:
        if not name or not path:
            raise bad_request("Both 'lora_name' and 'lora_path' must be provided.", "lora_name")
        async with self._lock:
            if self._names.is_model(name):
                raise bad_request(f"The lora adapter '{echo(name)}' conflicts with a served base model.", "lora_name")
            known_adapter = self._names.find_adapter(name)
            if known_adapter is not None and not replaces:
                message = f"The lora adapter '{echo(name)}' has already been loaded. If you want to load the adapter"
                raise bad_request(f"{message} in place, set 'load_inplace' to True.", "lora_name")
            if known_adapter is None and len(self._names.adapters) >= NAMES_MAX:
                raise bad_request(f"There are {NAMES_MAX} adapters already; unload one", "lora_name")
            name = name if known_adapter is None else known_adapter.name
            adapter = await asyncio.to_thread(self._read_files, name, path)
            await self._call_engine(AdapterFiles(name, str(adapter.folder), adapter.digest))
            self._names.put_adapter(adapter)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, name: str) -> Response:
        if not name:
            raise bad_request("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
        async with self._lock:
            adapter = self._names.find_adapter(name)
            if adapter is None:
                message = f"The lora adapter '{echo(name)}' cannot be found."
                raise ApiError(404, message, param="lora_name", code="adapter_not_found")
            self._names.remove_adapter(adapter)
            await self._call_engine(adapter.name, is_fixed=self._names.is_fixed(adapter.name))
        return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' removed successfully.")

    def _read_files(self, name: str, path: str) -> Adapter:
        """Raises :class:`ApiError`: 404 where there is no such folder, or none that may be read; 500 for one that no
        adapter can be made of, as vLLM does."""
        folder = self._folder or Path()
        place = (folder / path).resolve()
        if not place.is_relative_to(folder) or not (place / CONFIG).is_file():
            message = f"Loading lora {echo(name)} failed: No adapter found for {echo(path)} (below --lora-folder)"
            raise ApiError(404, message, param="lora_path", code="adapter_not_found")
        try:
            read = read_adapter(name, place)
        except UserError as error:
            raise _not_loaded(error.message) from None
        return Adapter(read.name, read.folder, read.digest, read.config, path)

    async def _call_engine(self, subject: AdapterFiles | str, *, is_fixed: bool = False) -> None:
        """Load files, or unload a name; ``is_fixed``: of an adapter of the start. Raises :class:`ApiError`."""
        if not isinstance(self._engine, AdaptingEngine):
            raise engine_silent()
        calls = self._engine
        if isinstance(subject, AdapterFiles):
            future = calls.load_adapter(subject)
        else:
            future = calls.unload_adapter(subject, is_fixed=is_fixed)
        try:
            answer = await asyncio.wait_for(asyncio.wrap_future(future), ANSWERED_WITHIN_S)
        except TimeoutError:
            raise engine_silent() from None
        if answer.error and answer.is_passing:
            raise ApiError(503, answer.error, kind="server_error", code="overloaded", headers={"retry-after": "1"})
        if answer.error:
            raise _not_loaded(answer.error)


def _adapter_of(files: AdapterFiles) -> Adapter:
    """As a name leads to it; what it adds is the instances' matter."""
    return Adapter(files.name, Path(files.folder), files.digest, AdapterConfig(), files.folder)


def _not_loaded(reason: str) -> ApiError:
    return ApiError(500, reason, kind="server_error", param="lora_path", code="adapter_not_loaded")
