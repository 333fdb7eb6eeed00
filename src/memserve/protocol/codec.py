"""Messages and their envelopes as bytes: msgpack, typed, bounded.

A frame is four bytes of protocol (``mss`` and the version), then an :class:`Envelope`. The message inside is decoded
only when the frame is for us and new. Whatever arrives, the only error is :class:`WireError`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from memserve.base.errors import MemserveError, UserError
from memserve.base.units import MIB
from memserve.protocol.messages import AnyMessage
from memserve.protocol.peers import Natural, Peer

VERSION = 3
"""Of envelope and messages: raised whenever an older process would misread them. Fields added at the end don't."""
MAGIC = b"mss"

FRAME_BYTES_MAX = 64 * MIB
"""Longer messages are neither sent nor read. A snapshot of a million cached blocks has 16 MB."""
TOKENS_MAX = 1 << 22
"""Tokens of one prompt."""


class WireError(MemserveError):
    """Bytes that are no message."""


class WireVersionError(WireError):
    """A frame of another protocol version."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """Sender and receiver. ``number`` grows with every frame of one sender's generation."""

    sender: Peer
    reply_to: str
    """Address of the sender's mailbox."""
    receiver: Peer
    """Generation 0: the bearer of the name now."""
    number: Natural
    message: msgspec.Raw


def _to_wire(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.astype("<i4", copy=False).tobytes()
    raise WireError(f"{type(value).__name__} cannot be sent")


def _from_wire(kind: Any, value: Any) -> Any:
    """The only types of ours that msgpack doesn't know are token arrays. Errors are turned into ``WireError`` above."""
    if not isinstance(value, bytes) or len(value) % 4:
        raise ValueError("a token array is whole little-endian int32")
    tokens = np.frombuffer(value, "<i4").astype(np.int32, copy=False)
    if len(tokens) > TOKENS_MAX:
        raise ValueError(f"{len(tokens)} tokens are more than {TOKENS_MAX}")
    if len(tokens) and int(tokens.min()) < 0:
        raise ValueError("a token id is negative")
    return tokens


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_messages: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage, dec_hook=_from_wire)
_envelopes = msgspec.msgpack.Decoder(Envelope)
_PROTOCOL = MAGIC + bytes([VERSION])
_MALFORMED = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, UserError)
"""What the decoder raises on bad bytes: for text that is no UTF-8 ``ValueError``, when too deep ``RecursionError``, for
a KV geometry that cannot be ``UserError``."""


def encode(message: AnyMessage) -> bytes:
    """``message`` as msgpack. Token arrays become little-endian int32 bytes.

    Raises :class:`WireError` when it has a field that cannot be sent (an integer of more than 64 bits, say).
    """
    try:
        return _encoder.encode(message)
    except _MALFORMED as error:
        raise WireError(f"cannot send {type(message).__name__}: {error}") from error


def decode(data: bytes | memoryview | msgspec.Raw) -> AnyMessage:
    """The message in ``data``; its token arrays are int32 ``[n]``, read-only and never negative.

    Raises :class:`WireError`, and nothing else, for bytes that are no message.
    """
    try:
        return _messages.decode(data)
    except _MALFORMED as error:
        raise WireError(f"not a message: {error}") from error


def seal(sender: Peer, reply_to: str, receiver: Peer, number: int, message: bytes) -> bytes:
    """The frame around an encoded message."""
    return _PROTOCOL + _encoder.encode(Envelope(sender, reply_to, receiver, number, msgspec.Raw(message)))


def unseal(frame: bytes) -> Envelope:
    """The envelope of a frame, its message still encoded.

    Raises :class:`WireVersionError` for a message of another version, :class:`WireError` for anything that is none.
    """
    if frame[:3] != MAGIC or len(frame) < 4:
        raise WireError("not a frame")
    if frame[3] != VERSION:
        raise WireVersionError(f"protocol version {frame[3]}, this is {VERSION}")
    try:
        return _envelopes.decode(memoryview(frame)[4:])
    except _MALFORMED as error:
        raise WireError(f"not an envelope: {error}") from error
