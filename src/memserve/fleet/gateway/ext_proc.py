"""Envoy's external processing protocol, as far as a choice of endpoints needs it: its messages read and written.

::

    gateway                                           picker
      request_headers, with the modes of bodies ------->
      request_body ... (in pieces, or whole) ---------->
      <------ request_headers or request_body: x-gateway-destination-endpoint, and the same under "envoy.lb"
      <------ request_body ... (in pieces: as it came, or another one)
      response_headers, response_body, trailers ------->
      <------ each as it came

How bodies come the gateway says first (:class:`BodyMode`): in pieces nothing is answered before the body is here; a
whole one comes only when the headers were answered. The words are those of ``envoy.service.ext_proc.v3`` (Apache 2.0,
from the package xds-protos) and of the Gateway API inference extension's endpoint picker protocol, 1.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    ImmediateResponse,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.struct_pb2 import Struct

from memserve.api.http.errors import ApiError, bad_request
from memserve.base.units import KIB

ENDPOINT = "x-gateway-destination-endpoint"
NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
SERVED = "x-gateway-destination-endpoint-served"
UPSTREAM = "upstream.address"
PIECE_BYTES = 60 * KIB
"""Of a body that is sent on in pieces: gateways take no larger frames as they are."""


class BodyMode(StrEnum):
    """How a gateway sends the body of a request or an answer."""

    NONE = "none"
    WHOLE = "whole"  # BUFFERED
    PIECES = "pieces"  # FULL_DUPLEX_STREAMED: it waits for none of them
    PASSING = "passing"  # STREAMED: headers have gone on when it comes


_MODES = {
    ProcessingMode.NONE: BodyMode.NONE,
    ProcessingMode.STREAMED: BodyMode.PASSING,
    ProcessingMode.BUFFERED: BodyMode.WHOLE,
    ProcessingMode.BUFFERED_PARTIAL: BodyMode.WHOLE,
    ProcessingMode.FULL_DUPLEX_STREAMED: BodyMode.PIECES,
}


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What the first message of a stream says."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case; the first of each name."""
    ends: bool
    """The request has no body."""
    body: BodyMode
    answer_body: BodyMode
    subset: frozenset[str] | None
    """Endpoints, ``IP:PORT``, that may be chosen. None: all."""

    @property
    def body_comes_first(self) -> bool:
        """Whether the body is here before the choice must be."""
        return not self.ends and self.body in (BodyMode.WHOLE, BodyMode.PIECES)


@dataclass(frozen=True, slots=True)
class Pick:
    """Where a request is to go."""

    endpoints: tuple[str, ...]
    """``IP:PORT``, in the order in which they are to be tried."""
    headers: Mapping[str, str]
    """Of the request, to be set; an empty value: to be removed."""
    body: bytes | None = None
    """Another body than came."""


def read_head(message: Any) -> RequestHead:
    """The head of a request. Raises :class:`ApiError` 400 for any other message."""
    if message.WhichOneof("request") != "request_headers":
        raise bad_request("A stream of external processing begins with the headers of a request")
    fields = message.request_headers.headers.headers
    # reversed: of a name that comes twice the first one stays, as servers have it
    headers = {field.key.lower(): _text_of(field) for field in reversed(fields)}
    modes = BodyMode.PIECES, BodyMode.PIECES  # which the protocol asks for
    if message.HasField("protocol_config"):
        config = message.protocol_config
        modes = _mode_of(config.request_body_mode), _mode_of(config.response_body_mode)
    return RequestHead(
        headers.get(":method", ""), headers.get(":path", ""), headers, message.request_headers.end_of_stream, *modes,
        _read_subset(message),
    )  # fmt: skip


def _mode_of(mode: int) -> BodyMode:
    return _MODES.get(mode, BodyMode.NONE)


def _text_of(field: Any) -> str:
    return str(field.raw_value, "latin-1") if field.raw_value else str(field.value)


def _read_subset(message: Any) -> frozenset[str] | None:
    metadata = message.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in metadata or SUBSET not in metadata[SUBSET_NAMESPACE].fields:
        return None
    value = metadata[SUBSET_NAMESPACE].fields[SUBSET]
    texts = (
        value.string_value.split(",")
        if value.HasField("string_value")
        else [item.string_value for item in value.list_value.values]
    )
    return frozenset(text.strip() for text in texts if text.strip())


def read_status(message: Any) -> int:
    """The status of an answer; 0: it has none."""
    fields = message.response_headers.headers.headers
    text = next((_text_of(field) for field in fields if field.key == ":status"), "")
    return int(text) if text.isdecimal() else 0


def read_served(message: Any) -> str:
    """The endpoint that answered, as the gateway says, or Envoy where its attributes are sent; empty: not known."""
    metadata = message.metadata_context.filter_metadata
    if NAMESPACE in metadata and SERVED in metadata[NAMESPACE].fields:
        return str(metadata[NAMESPACE].fields[SERVED].string_value)
    addresses = (attributes.fields[UPSTREAM] for attributes in message.attributes.values())
    return next((str(address.string_value) for address in addresses if address.string_value), "")


# -- answers


def _options(headers: Mapping[str, str]) -> list[Any]:
    return [
        HeaderValueOption(
            header=HeaderValue(key=name, raw_value=value.encode("latin-1")),
            append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for name, value in headers.items()
    ]


def _mutation(headers: Mapping[str, str]) -> Any:
    changed = {name: value for name, value in headers.items() if value}
    return HeaderMutation(set_headers=_options(changed), remove_headers=sorted(headers.keys() - changed.keys()))


def continued_headers() -> Any:
    """The headers go on; what becomes of them is said with the body."""
    return ProcessingResponse(request_headers=HeadersResponse(response=CommonResponse()))


def picked(head: RequestHead, pick: Pick, body: bytes, *, has_trailers: bool) -> Iterator[Any]:
    """What tells a gateway ``pick``, in order; ``body``: as it came, empty where it has not. ``has_trailers``: they
    have come behind it."""
    text = ",".join(pick.endpoints)
    metadata = Struct()
    metadata.update({NAMESPACE: {ENDPOINT: text}})
    headers = {ENDPOINT: text, **pick.headers}
    sent_body = body if pick.body is None else pick.body
    if pick.body is not None:
        headers["content-length"] = str(len(sent_body))
    # a route may be chosen by the headers that are set here: it has to be looked for anew
    common = CommonResponse(header_mutation=_mutation(headers), clear_route_cache=True)
    if head.body is BodyMode.WHOLE and not head.ends:
        if pick.body is not None:
            common.body_mutation.CopyFrom(BodyMutation(body=pick.body))
        yield ProcessingResponse(request_body=BodyResponse(response=common), dynamic_metadata=metadata)
    else:
        yield ProcessingResponse(request_headers=HeadersResponse(response=common), dynamic_metadata=metadata)
        if head.body_comes_first:
            for piece, ends in pieces_of(sent_body):
                yield ProcessingResponse(request_body=_streamed(piece, ends and not has_trailers))
    if has_trailers:
        yield ProcessingResponse(request_trailers=TrailersResponse())


def pieces_of(body: bytes) -> Iterator[tuple[bytes, bool]]:
    """``body`` in pieces, each with whether it is the last one; one piece at least."""
    for start in range(0, max(1, len(body)), PIECE_BYTES):
        yield body[start : start + PIECE_BYTES], start + PIECE_BYTES >= len(body)


def _streamed(piece: bytes, ends: bool) -> Any:
    streamed = StreamedBodyResponse(body=piece, end_of_stream=ends)
    return BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=streamed)))


def passed_on(message: Any, head: RequestHead, answer_headers: Mapping[str, str]) -> Any:
    """What follows the choice goes on as it came, but for ``answer_headers``, which the answer gets."""
    kind = message.WhichOneof("request")
    if kind == "response_headers":
        common = CommonResponse(header_mutation=_mutation(answer_headers) if answer_headers else None)
        return ProcessingResponse(response_headers=HeadersResponse(response=common))
    if kind in ("request_trailers", "response_trailers"):
        return ProcessingResponse(**{kind: TrailersResponse()})
    if kind not in ("request_body", "response_body"):
        raise bad_request("The headers of a request came twice")
    body, mode = getattr(message, kind), head.body if kind == "request_body" else head.answer_body
    if mode is BodyMode.PIECES:
        return ProcessingResponse(**{kind: _streamed(body.body, body.end_of_stream)})
    return ProcessingResponse(**{kind: BodyResponse(response=CommonResponse())})


def refused(error: ApiError, extra_headers: Iterable[tuple[str, str]] = ()) -> Any:
    """The gateway answers its client itself, with ``error``."""
    headers = {"content-type": "application/json", **error.headers, **dict(extra_headers)}
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=error.status),
            headers=HeaderMutation(set_headers=_options(headers)),
            body=error.encode_body(),
            details=f"memserve_{error.code or error.status}",
        )
    )
