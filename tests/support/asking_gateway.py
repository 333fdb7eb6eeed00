"""A gateway that asks an endpoint picker, by hand: what Envoy sends, in any order that a test wants."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProtocolConfiguration,
)
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub

WAIT_S = 20.0
ENDPOINT = "x-gateway-destination-endpoint"
PIECES, WHOLE, NONE, PASSING = (
    ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.BUFFERED, ProcessingMode.NONE, ProcessingMode.STREAMED,
)  # fmt: skip


@dataclass
class Answer:
    """What the picker has said to a request."""

    endpoints: list[str] = field(default_factory=list)
    metadata: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    body: bytes = b""
    has_ended: bool = False
    """The last piece of the body, or the trailers behind it, came."""
    status: int = 200
    error: dict[str, Any] = field(default_factory=dict)


class Asking:
    """One request, as a stream of external processing."""

    def __init__(self, stub: Any, modes: tuple[int, int] | None) -> None:
        self._sent: queue.Queue[ProcessingRequest | None] = queue.Queue()
        self._modes = modes
        self._answers = stub.Process(iter(self._sent.get, None), timeout=WAIT_S)

    def send(self, **message: Any) -> None:
        """One message."""
        request = ProcessingRequest(**message)
        if self._modes is not None:  # with the first one alone
            request.protocol_config.CopyFrom(
                ProtocolConfiguration(request_body_mode=self._modes[0], response_body_mode=self._modes[1])
            )
            self._modes = None
        self._sent.put(request)

    def send_head(
        self, method: str = "POST", path: str = "/v1/completions", *, ends: bool = False,
        subset: list[str] | None = None, **headers: str,
    ) -> None:  # fmt: skip
        """The request's headers; names with underscores for dashes."""
        fields = {":method": method, ":path": path, "content-type": "application/json"}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        message = {"request_headers": HttpHeaders(headers=header_map(fields), end_of_stream=ends)}
        if subset is None:
            self.send(**message)
            return
        request = ProcessingRequest(**message)
        hint = request.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        hint.update({"x-gateway-destination-endpoint-subset": subset})
        self.send(**message, metadata_context=request.metadata_context)

    def send_body(self, body: bytes, *, ends: bool = True) -> None:
        """A piece of the request's body."""
        self.send(request_body=HttpBody(body=body, end_of_stream=ends))

    def send_answer(self, status: int = 200, *, ends: bool = False, served: str = "") -> None:
        """The headers of the engine's answer; ``served``: by this endpoint."""
        message = ProcessingRequest(
            response_headers=HttpHeaders(headers=header_map({":status": str(status)}), end_of_stream=ends)
        )
        if served:
            message.metadata_context.filter_metadata["envoy.lb"].update({f"{ENDPOINT}-served": served})
        self._sent.put(message)

    def send_answer_body(self, body: bytes, *, ends: bool = True) -> None:
        """A piece of the answer."""
        self.send(response_body=HttpBody(body=body, end_of_stream=ends))

    def send_trailers(self, of: str) -> None:
        """The end of a body: ``request`` or ``response``."""
        self.send(**{f"{of}_trailers": HttpTrailers()})

    def next(self) -> Any:
        """The picker's next message."""
        return next(self._answers)

    def answer(self) -> Answer:
        """All that it says until the request may go on, or has an answer."""
        answer = Answer()
        while not answer.has_ended:
            message = self.next()
            kind = message.WhichOneof("response")
            if kind == "immediate_response":
                response = message.immediate_response
                answer.status, answer.error = response.status.code, json.loads(response.body)["error"]
                answer.headers, answer.has_ended = texts_of(response.headers.set_headers), True
            elif kind == "request_trailers":
                answer.has_ended = True
            else:
                part = getattr(message, kind).response
                self._add_part(answer, message, part)
                streamed = part.body_mutation.streamed_response
                answer.body += streamed.body or part.body_mutation.body
                is_whole = kind == "request_body" and not part.body_mutation.HasField("streamed_response")
                answer.has_ended = streamed.end_of_stream or is_whole
        return answer

    def choice(self) -> Answer:
        """The next message, where the headers alone are answered."""
        answer, message = Answer(), self.next()
        self._add_part(answer, message, message.request_headers.response)
        return answer

    def _add_part(self, answer: Answer, message: Any, part: Any) -> None:
        answer.headers |= texts_of(part.header_mutation.set_headers)
        answer.removed += part.header_mutation.remove_headers
        if ENDPOINT in answer.headers:
            answer.endpoints = answer.headers[ENDPOINT].split(",")
        if "envoy.lb" in message.dynamic_metadata.fields:
            answer.metadata = message.dynamic_metadata["envoy.lb"][ENDPOINT]

    def end(self) -> list[Any]:
        """Close the stream, as a gateway does when the request is over; what came meanwhile."""
        self._sent.put(None)
        return list(self._answers)

    def break_off(self) -> None:
        """The gateway is gone."""
        self._answers.cancel()
        self._sent.put(None)


class AskingGateway:
    """Connected to one picker."""

    def __init__(self, picker: str, certificate: bytes | None = None) -> None:
        self.channel = (
            grpc.insecure_channel(picker)
            if certificate is None
            else grpc.secure_channel(picker, grpc.ssl_channel_credentials(certificate))
        )
        self._stub = ExternalProcessorStub(self.channel)

    def begin(self, modes: tuple[int, int] | None = (PIECES, PIECES)) -> Asking:
        """A stream. ``modes``: of the bodies of request and answer; None: the gateway does not say."""
        return Asking(self._stub, modes)

    def ask(self, fields: Mapping[str, Any], modes: tuple[int, int] | None = (PIECES, PIECES), **head: Any) -> Answer:
        """Where a request goes; the stream ends at once."""
        asking = self.begin(modes)
        asking.send_head(**head)
        if modes is not None and modes[0] == WHOLE:
            asking.next()
        asking.send_body(json.dumps(fields).encode())
        answer = asking.answer()
        asking.end()
        return answer

    def __enter__(self) -> AskingGateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()


def header_map(fields: Mapping[str, str]) -> Any:
    """As gateways send them."""
    return HeaderMap(headers=[HeaderValue(key=name, raw_value=value.encode()) for name, value in fields.items()])


def texts_of(options: Any) -> dict[str, str]:
    """Headers that are to be set."""
    return {option.header.key: option.header.raw_value.decode() for option in options}


def pieces(body: bytes, size: int) -> Iterator[tuple[bytes, bool]]:
    """``body`` in pieces, each with whether it is the last."""
    for start in range(0, len(body), size):
        yield body[start : start + size], start + size >= len(body)
