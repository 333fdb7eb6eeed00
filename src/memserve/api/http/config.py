"""What the HTTP server takes from its clients, and for how long it waits for them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memserve.base.config import DEFAULT_MAX_TOKENS, DRAIN_S
from memserve.base.errors import UserError
from memserve.base.options import MANY, MEBIBYTES, SIZE, check_ranges, option
from memserve.base.types import RequestLogFormat
from memserve.base.units import GIB, KIB, MIB, human_bytes

_ORIGIN = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9._~-]+(:[0-9]{1,5})?|[a-z-]+://\[[0-9A-Fa-f:]+\](:[0-9]{1,5})?"
)
"""Scheme, host and port; host names or addresses."""
_ROOT = re.compile(r"(/[A-Za-z0-9._~-]+)+")
TOOL_CALL_PARSERS = ("auto", "hermes", "qwen", "llama3", "mistral")
REASONING_PARSERS = ("auto", "think", "none")
RERANKERS = ("auto", "qwen3", "none")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where the HTTP server listens, under which names it answers, and how it ends."""

    host: str = option("127.0.0.1")
    """Address to listen on. 0.0.0.0: every network."""
    port: int = option(8000, least=0, most=65535)
    """Port to listen on, which routers of one host may share. 0: any free one."""
    served_model_names: tuple[str, ...] = option((), "--served-model-name", form=MANY)
    """Name under which clients ask for the model; repeatable, the first stands in answers. Default: the model's own."""
    generation_config: bool = option(True)
    """Take defaults of sampling from the model's generation_config.json."""
    default_max_tokens: int = option(DEFAULT_MAX_TOKENS, least=0)
    """Longest chat answer of a request without max_tokens, in tokens. 0: what the context has room for."""
    drain_s: float = option(DRAIN_S, least=0)
    """Seconds that streams may go on after SIGTERM or SIGHUP."""
    log_level: str = option("warning")
    """Lowest level that is logged: debug, info, warning, error."""
    admin_key_file: str | None = option(None)
    """With named models: file with the key by which ``memserve model`` adds and removes models, and puts them to sleep.
    None: it cannot."""
    endpoint_picker: str | None = option(None)
    """HOST:PORT: tell gateways there where requests shall go (Envoy's external processing, as the Gateway API inference
    extension has it): to the servers of ``--engine``, else to the routers of this cluster (extra ``gateway``)."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """How the HTTP API reads requests and writes answers."""

    lenient: bool = option(False)
    """Leave out fields of requests that memserve does not know, with a warning. Without it, only those that vLLM knows;
    any other is refused."""
    root_path: str = option("")
    """Serve below this path as well, e.g. ``/llm``: for a proxy that passes it on."""
    tool_call_parser: str = option("auto")
    """How the model writes tool calls: auto (as its chat template says), hermes, qwen, llama3 or mistral."""
    reasoning_parser: str = option("auto")
    """Where the model's thoughts stand, which chats report as ``reasoning_content``: think (between ``<think>`` and
    ``</think>``), none (nowhere), or auto (think where the chat template has such a mark)."""
    enable_force_include_usage: bool = option(False)
    """Each chunk of each stream carries the usage, as if ``stream_options`` asked for it."""
    return_tokens_as_token_ids: bool = option(False)
    """Logprobs name tokens ``token_id:N``, as if each request asked for it."""
    trust_content_tokens: bool = option(False)
    """Control tokens written in messages, tools and documents (``<|im_end|>``) are control tokens. Without it they are
    text, so that no content can end a turn or begin one."""
    otlp_endpoint: str = option("")
    """Send a trace of each request to this OTLP receiver, e.g. ``http://127.0.0.1:4318``: a span a stage (extra
    ``otel``)."""
    reranker: str = option("auto")
    """How the model says whether a document is relevant, for ``/v1/rerank`` and ``/v1/score``: qwen3 (it answers yes or
    no, in the template of Qwen3-Reranker), none, or auto (qwen3 where the model is called so)."""
    embedding_tokens_max: int = option(0, least=0)
    """Longest text that is embedded, in tokens. What is longer than the context is embedded in pieces; the embedding is
    their mean, weighted by tokens. 0: as long as the context."""

    def __post_init__(self) -> None:
        choices = (
            ("tool_call_parser", TOOL_CALL_PARSERS), ("reasoning_parser", REASONING_PARSERS), ("reranker", RERANKERS)
        )  # fmt: skip
        for name, parsers in choices:
            parser = getattr(self, name)
            if parser not in parsers:
                words = name.replace("_", " ")
                raise UserError(
                    f"unknown {words} {parser[:100]!r}", hint=f"use one of {', '.join(parsers)}", param=name
                )
        if self.root_path and not _ROOT.fullmatch(self.root_path):
            raise UserError(f"{self.root_path[:200]!r} is no path", hint="give one like /llm", param="root_path")
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            hint = "give scheme, host and port: --otlp-endpoint http://127.0.0.1:4318"
            raise UserError(f"{self.otlp_endpoint[:200]!r} is no OTLP receiver", hint=hint, param="otlp_endpoint")


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """Limits of the HTTP server: how much its clients may make it hold, and for how long."""

    connections_max: int = option(1024, "--max-connections", least=1)
    """Open connections. One more closes the longest idle connection of the client address that has the most
    connections. If none is idle, the new connection is refused with 503."""
    connections_per_address_max: int = option(0, "--max-connections-per-address", least=0)
    """Open connections of one client address. 0: no limit, because behind a proxy all clients have one address."""
    head_bytes_max: int = 64 * KIB
    """Bytes of the request line and headers."""
    url_bytes_max: int = 16 * KIB
    """Bytes of the URL in the request line."""
    fields_max: int = 128
    """Number of headers of one request."""
    trailer_bytes_max: int = 16 * KIB
    """Bytes of the trailer of a chunked body, which is read and dropped."""
    body_bytes_max: int = option(16 * MIB, "--max-body-mib", form=MEBIBYTES, least=1)
    """Largest request body, on the command line in MiB."""
    body_memory_bytes: int | None = option(None, "--body-memory", form=SIZE)
    """Memory for all request bodies that are being read or parsed. None: four times the largest body."""
    body_memory_per_client_bytes: int | None = option(None, "--body-memory-per-client", form=SIZE)
    """Memory for the request bodies of one tenant, or of one address where requests name no tenant. None: half of that
    for all bodies."""
    header_timeout_s: float = option(10.0)
    """Seconds from the start of a connection, or the first byte of a later request, to the end of its headers."""
    body_timeout_s: float = option(60.0)
    """Seconds from the end of the headers to the end of the body."""
    keep_alive_s: float = option(75.0)
    """Seconds that a connection may be idle between two requests."""
    write_timeout_s: float = option(20.0)
    """A client that reads nothing of its answer for this many seconds is cut off, and its request cancelled."""
    file_bytes_max: int = option(200 * MIB, "--max-file", form=SIZE)
    """Largest file that may be uploaded for batches."""
    file_storage_bytes: int = option(4 * GIB, "--file-storage", form=SIZE)
    """Disk for the files of one tenant: what it uploads, and what its batches write."""
    stream_buffer_bytes: int = option(4 * MIB, "--stream-buffer", form=SIZE)
    """Output of one stream that its client has not read yet; more ends the stream with an error."""
    cors_origins: tuple[str, ...] = option((), "--cors-origin", form=MANY)
    """Origin whose web pages may use the API, e.g. ``https://chat.example.com``; ``*``: all. Repeatable; without it, no
    page may."""
    log_requests: RequestLogFormat = option(RequestLogFormat.NONE)
    """Log one line on stderr for each request below ``/v1/``, as ``name=value`` or JSON: ids, tenant, tokens, times,
    instances; no content, no key."""

    def __post_init__(self) -> None:
        check_ranges(self)
        for name in ("head_bytes_max", "url_bytes_max", "fields_max", "trailer_bytes_max", "stream_buffer_bytes"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1", param=name)
        for name in ("header_timeout_s", "body_timeout_s", "keep_alive_s", "write_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"{name} must be a positive number of seconds", param=name)
        if self.body_share_bytes < self.body_bytes_max:
            raise UserError(
                f"one body of {human_bytes(self.body_bytes_max)} does not fit into the memory that bodies may take",
                hint="raise --body-memory and --body-memory-per-client, or lower --max-body-mib",
                param="body_memory",
            )
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                hint = "give scheme, host and port without a path: --cors-origin https://chat.example.com"
                raise UserError(f"{origin[:200]!r} is not an origin", hint=hint, param="cors_origin")

    @property
    def body_total_bytes(self) -> int:
        """All bodies together."""
        return 4 * self.body_bytes_max if self.body_memory_bytes is None else self.body_memory_bytes

    @property
    def body_share_bytes(self) -> int:
        """The bodies of one client; never more than all bodies together."""
        share = self.body_memory_per_client_bytes
        return min(self.body_total_bytes, self.body_total_bytes // 2 if share is None else share)
