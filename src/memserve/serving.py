"""What every serving machine hears and says, an instance as well as the cluster's router (level 0)."""

from __future__ import annotations

from dataclasses import dataclass

from memserve.messages import AnyMessage, Peer
from memserve.types import Request, TokenArray, TokenOutput, isolation


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A client's request, already tokenized and validated against the model's limits."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client went away: every sequence of the request ends now."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SequenceStopped:
    """The edge found a stop string in the text of one sequence: it ends with ``FinishReason.STOP``."""

    request_id: str
    index: int


@dataclass(frozen=True, slots=True)
class PrefixPinned:
    """A client asked to keep the cached prefix of ``tokens`` for ``ttl_ns`` under a name (row M14).

    In a cluster, requests of the same tenant whose ``session`` is this name prefer the instance where it lies.
    Repeated: renewed, and extended to the new ``tokens``.
    """

    handle: str
    tenant: str
    tokens: TokenArray
    ttl_ns: int
    salt: str = ""  # of the requests that computed the prefix

    @property
    def isolation(self) -> str:
        """Name of the KV that the prefix belongs to."""
        return isolation(self.tenant, self.salt)


@dataclass(frozen=True, slots=True)
class PrefixUnpinned:
    """The name is given up."""

    handle: str
    tenant: str


@dataclass(frozen=True, slots=True)
class ClockTicked:
    """Time passed: deadlines are looked at."""


@dataclass(frozen=True, slots=True)
class MessageArrived:
    """Another process said something. The link has checked who it is, and that nothing is heard twice."""

    sender: Peer
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class EmitTokens:
    """Deliver new tokens and endings to whoever waits for them."""

    outputs: list[TokenOutput]


@dataclass(frozen=True, slots=True)
class RejectRequest:
    """The request can never run here, or there is no room for it in the queue. Nothing of it is held."""

    request_id: str
    reason: str
    retry_after_s: float | None = None  # None: do not retry
    overloaded: bool = False  # True: no matter who asks, there is too much to do


@dataclass(frozen=True, slots=True)
class Send:
    """Say something to another process. It may get lost; nothing waits for an answer without a deadline."""

    to: Peer
    message: AnyMessage
