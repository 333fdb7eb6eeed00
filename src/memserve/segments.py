"""Sequences larger than an instance: their parts, and what is said about them, beside ``memserve.messages``.

::

    router                     holder A          holder B              runner
    Dispatch(span: holds)  --> computes [0, a)
    SegmentHeld            <-- keeps its blocks
    Dispatch(span: holds)  -------------------> computes [a, b), asks A
    SegmentHeld            <------------------- keeps its blocks
    Dispatch(span)         ------------------------------------------> computes [b, n), decodes, asks A and B
    Cancel                 --> --> when the request has ended

All dispatches of an attempt have one id: it names the held segments. A holder repeats ``SegmentHeld``, so that a router
that has forgotten the attempt can cancel it.
"""

from __future__ import annotations

from memserve.peers import Message, Natural, Peer
from memserve.types import TokenArray

RETRY_S = 0.2
"""Between two looks whether instances are free for parts of another sequence."""


class Segment(Message, frozen=True):
    """Tokens of a sequence, one behind the other, whose KV another instance keeps."""

    peer: Peer
    address: str
    """Where it answers queries, ``tcp://host:port``."""
    tokens: Natural


class Span(Message, frozen=True):
    """Which part of a sequence the receiver of a ``Dispatch`` computes: what the request has as its prompt."""

    before: TokenArray
    """All tokens before that part."""
    segments: tuple[Segment, ...]
    """The instances that keep the KV of those, in order."""
    holds: bool
    """True: compute the prompt, and keep it until ``Cancel``. False: this is the last part, with the answer."""


class SegmentHeld(Message, frozen=True, tag=True):
    """The holder has computed its part of a request, and answers queries."""

    request_id: str
    tokens: Natural
