"""What a router asks of engines: whether they are well, how busy they are, their KV events; and small pages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import ssl
from collections.abc import Callable
from dataclasses import replace

import msgspec
import zmq
import zmq.asyncio

from memserve.api.http.client import HttpCall, HttpFault
from memserve.base.units import MIB
from memserve.fleet.messages import EngineKind, EngineReport, EngineSpec, KvReceived, ReplayEnded
from memserve.system.secrets import Followed

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Between two looks at an engine."""
LOOK_S = 2.0
"""How long an engine has to say that it is well."""
REPLAY_S = 5.0
"""How long an engine has for the next batch of a replay."""
PAGE_BYTES_MAX = 8 * MIB
END_SEQUENCE = b"\xff" * 8

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(\{[^}]*\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_METRICS = {
    EngineKind.VLLM: ("vllm:num_requests_running", "vllm:num_requests_waiting",
                      ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),
    EngineKind.SGLANG: ("sglang:num_running_reqs", "sglang:num_queue_reqs", ("sglang:token_usage",)),
    EngineKind.LLAMACPP: ("llamacpp:requests_processing", "llamacpp:requests_deferred",
                          ("llamacpp:kv_cache_usage_ratio",)),
    EngineKind.MEMSERVE: ("memserve_instance_sequences_running", "memserve_instance_requests_waiting", ()),
}  # fmt: skip
"""Running, waiting, and the share of KV memory in use, by newer and older names."""


class EngineClient:
    """In one event loop; of as many engines as there are."""

    def __init__(
        self, key: Followed[str] | Followed[str | None], post: Callable[[KvReceived | ReplayEnded], None]
    ) -> None:
        """``key``: the engines' own API key, empty or None: they have none. ``post`` takes what they publish."""
        self._key, self._post = key, post
        self._context: zmq.asyncio.Context | None = None
        #: for engines at ``https``; None: their certificates are checked
        self.tls: ssl.SSLContext | None = None

    def close(self) -> None:
        """Close all sockets. The tasks that read them have been cancelled."""
        if self._context is not None:
            self._context.destroy(linger=0)

    async def read_report(self, spec: EngineSpec) -> EngineReport:
        """What it says of itself. Raises :class:`HttpFault` where it is not well."""
        if spec.kind is not EngineKind.OPENAI:  # of which nothing but its models is known
            await self._read_page(spec, "/health")
        models = models_of(await self._read_page(spec, "/v1/models"))
        try:
            if spec.kind is EngineKind.OPENAI:
                return EngineReport(models)
            if spec.kind is EngineKind.LLAMACPP:
                return await self._read_slots(spec, models)
            status, body = await self.fetch_page(spec, "GET", "/metrics", b"", LOOK_S)
        except HttpFault:  # what it says about its load is of use, but not needed
            return EngineReport(models)
        return report_of(spec.kind, models, body.decode("utf-8", "replace") if status == 200 else "")

    async def _read_slots(self, spec: EngineSpec, models: dict[str, str]) -> EngineReport:
        """Of llama.cpp: from its metrics where it shows them (``--metrics``), else from its slots."""
        status, body = await self.fetch_page(spec, "GET", "/metrics", b"", LOOK_S)
        report = report_of(spec.kind, models, body.decode("utf-8", "replace") if status == 200 else "")
        if report.running is None:
            status, body = await self.fetch_page(spec, "GET", "/slots", b"", LOOK_S)
            report = replace(report, running=busy_slots(body) if status == 200 else None)
        status, body = await self.fetch_page(spec, "GET", "/props", b"", LOOK_S)
        return replace(report, kv_tokens=slot_tokens(body) if status == 200 else 0)

    async def _read_page(self, spec: EngineSpec, path: str) -> bytes:
        """Raises :class:`HttpFault` for a page without which it cannot be used."""
        status, body = await self.fetch_page(spec, "GET", path, b"", LOOK_S)
        if status != 200:
            raise HttpFault(f"its {path} says {status}", refuses=True)
        return body

    async def fetch_page(
        self, spec: EngineSpec, method: str, path: str, body: bytes, deadline_s: float
    ) -> tuple[int, bytes]:
        """Status and body of a small answer. Raises :class:`HttpFault`."""
        headers = [(b"accept", b"*/*"), (b"content-type", b"application/json")]
        if (key := self._key.value()) is not None:
            headers.append((b"authorization", b"Bearer %b" % key.encode()))
        call = HttpCall(spec.url, self.tls)
        try:
            async with asyncio.timeout(deadline_s):
                await call.send_request(method, spec.base_path + path, headers, body, deadline_s)
                return call.status, await call.read_body(PAGE_BYTES_MAX, deadline_s)
        except TimeoutError:
            raise HttpFault(f"{path} took longer than {deadline_s:g} s", status=504) from None
        finally:
            call.close()

    # -- KV events

    async def read_kv_events(self, spec: EngineSpec) -> None:
        """Post what it publishes, until the task is cancelled."""
        socket = self._open_socket(zmq.SUB, spec.events, lambda new_socket: new_socket.setsockopt(zmq.SUBSCRIBE, b""))
        with contextlib.closing(socket):
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == 3 and len(frames[1]) == 8:
                    self._post(KvReceived(spec.name, int.from_bytes(frames[1], "big"), frames[2]))

    async def read_replay(self, spec: EngineSpec, first: int) -> None:
        """Post what it repeats of its batches from ``first`` on, then ``ReplayEnded``."""
        socket = self._open_socket(zmq.DEALER, spec.replay, lambda new_socket: None)
        try:
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(REPLAY_S):
                    frames = await socket.recv_multipart()
                if len(frames) < 3 or frames[-2] == END_SEQUENCE:
                    break
                if len(frames[-2]) == 8:
                    number = int.from_bytes(frames[-2], "big")
                    self._post(KvReceived(spec.name, number, frames[-1], replayed=True))
        except TimeoutError:
            log.warning("engine %s did not repeat its KV events", spec.name)
        finally:
            socket.close(linger=0)
        self._post(ReplayEnded(spec.name))

    def _open_socket(
        self, kind: int, address: str, prepare: Callable[[zmq.asyncio.Socket], None]
    ) -> zmq.asyncio.Socket:
        if self._context is None:
            self._context = zmq.asyncio.Context()
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 100_000)
        prepare(socket)
        socket.connect(address)
        return socket


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: object = None


class _Cards(msgspec.Struct):
    data: list[_Card]


def models_of(body: bytes) -> dict[str, str]:
    """``/v1/models``: names, and the weights behind each; an adapter has weights of its own. Raises
    :class:`HttpFault`."""
    try:
        cards = msgspec.json.decode(body, type=_Cards).data
    except (msgspec.DecodeError, RecursionError):
        raise HttpFault("its /v1/models is no list of models", refuses=True) from None
    cards.sort(key=lambda card: card.parent is not None)
    return {card.id: card.id if card.parent is not None else card.root or card.id for card in cards}


def context_of(body: bytes, model: str) -> int:
    """``/v1/models``: the longest sequence of ``model``, in tokens. 0: it does not say."""
    try:
        cards = msgspec.json.decode(body, type=_Cards).data
    except (msgspec.DecodeError, RecursionError):
        return 0
    tokens = next((card.max_model_len for card in cards if card.id == model), None)
    return max(0, tokens) if type(tokens) is int else 0


def report_of(kind: EngineKind, models: dict[str, str], page: str) -> EngineReport:
    """What ``/metrics`` says; numbers that make no sense are left out. Samples of several ranks are added up, shares
    averaged."""
    samples: dict[str, list[float]] = {}
    kv_tokens = 0
    for line in page.splitlines():
        sample = None if line.startswith("#") else _SAMPLE.match(line)
        if sample is None:
            continue
        name, labels, value = sample.groups()
        if name == "vllm:cache_config_info":
            kv_tokens += _cache_tokens(dict(_LABEL.findall(labels or "")))
        with contextlib.suppress(ValueError):
            number = float(value)
            if math.isfinite(number) and 0 <= number < 1e15:
                samples.setdefault(name, []).append(number)
    running, waiting, shares = _METRICS[kind]
    share = next((samples[name] for name in shares if name in samples), [])
    return EngineReport(
        models,
        int(sum(samples[running])) if running in samples else None,
        int(sum(samples.get(waiting, []))),
        min(1.0, sum(share) / len(share)) if share else 0.0,
        kv_tokens or int(sum(samples.get("sglang:max_total_num_tokens", []))),
        max(samples.get("process_start_time_seconds", [0.0])),
    )


class _Slot(msgspec.Struct):
    is_processing: bool = False


class _Settings(msgspec.Struct):
    n_ctx: int = 0


class _Props(msgspec.Struct):
    total_slots: int = 0
    default_generation_settings: _Settings = msgspec.field(default_factory=_Settings)


def busy_slots(body: bytes) -> int | None:
    """llama.cpp's ``/slots``: how many compute. None: it says something else."""
    try:
        return sum(slot.is_processing for slot in msgspec.json.decode(body, type=list[_Slot]))
    except (msgspec.DecodeError, RecursionError):
        return None


def slot_context(body: bytes) -> int:
    """llama.cpp's ``/props``: tokens that one of its slots holds. 0: it does not say."""
    return max(0, _read_props(body).default_generation_settings.n_ctx)


def slot_tokens(body: bytes) -> int:
    """The same of all its slots."""
    return max(0, _read_props(body).total_slots) * slot_context(body)


def _read_props(body: bytes) -> _Props:
    try:
        return msgspec.json.decode(body, type=_Props)
    except (msgspec.DecodeError, RecursionError):
        return _Props()


def _cache_tokens(labels: dict[str, str]) -> int:
    block, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
    return int(block) * int(blocks) if block.isdecimal() and blocks.isdecimal() else 0
