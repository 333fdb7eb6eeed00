"""Events and actions of every serving machine: of an instance as well as of the cluster's router.

Those of every request and every message are structs: one is made in a tenth of a frozen dataclass's time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from memserve.base.types import Request, TokenArray, TokenOutput, isolation
from memserve.protocol.messages import AdapterFiles, AnyMessage
from memserve.protocol.peers import Peer


class RequestArrived(msgspec.Struct, frozen=True):
    """A client's request, already tokenized and validated against the model's limits."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client left: every sequence of the request ends now."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SequenceStopped:
    """The edge found a stop string in the text of one sequence: it ends with ``FinishReason.STOP``."""

    request_id: str
    index: int


@dataclass(frozen=True, slots=True)
class ToolCalled:
    """The edge has read in an answer that it calls a tool: the request's session waits for that after its end."""

    request_id: str
    tool: str


@dataclass(frozen=True, slots=True)
class PrefixPinned:
    """A client asked to keep the cached prefix of ``tokens`` for ``ttl_ns`` under a name.

    In a cluster, requests of the same tenant whose ``session`` is this name prefer the instance where the prefix
    lies. A repeated pin is renewed, and extended to the new ``tokens``.
    """

    handle: str
    tenant: str
    tokens: TokenArray
    ttl_ns: int
    salt: str = ""  # of the requests that computed the prefix
    priority: float | None = None
    """It is retained: given up when room is needed and nothing else can make any, the lowest priority first. None: it
    is pinned."""

    @property
    def isolation(self) -> str:
        """:func:`memserve.base.types.isolation` of the prefix's tenant and salt."""
        return isolation(self.tenant, self.salt)


@dataclass(frozen=True, slots=True)
class PrefixUnpinned:
    """A client gave up the name of a pinned prefix."""

    handle: str
    tenant: str


class MessageArrived(msgspec.Struct, frozen=True):
    """A message of another process came. The link has checked its sender, and that no message comes twice."""

    sender: Peer
    message: AnyMessage


class EmitTokens(msgspec.Struct, frozen=True):
    """Deliver new tokens and endings to the sinks of their requests."""

    outputs: list[TokenOutput]


class KeyConflict(enum.Enum):
    """Why a connection does not get (the rest of) an answer with a key."""

    OTHER_REQUEST = "other request"  # the key was given to another one
    TAKEN_OVER = "taken over"  # another connection gets it


@dataclass(frozen=True, slots=True)
class RejectRequest:
    """Reject the request: it can never run here, or the queue has no room. The machine holds nothing for it."""

    request_id: str
    reason: str
    retry_after_s: float | None = None  # None: do not retry
    overloaded: bool = False  # True: the cluster is overloaded, not just this tenant
    conflict: KeyConflict | None = None  # None: it has none with another request of the same key


class Send(msgspec.Struct, frozen=True):
    """Send a message to another process. It may get lost; no machine waits for an answer without a deadline."""

    to: Peer
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class AdapterNamed:
    """Requests shall name this LoRA adapter; a name that there is already leads to it from then on. Answered."""

    call_id: int
    files: AdapterFiles


@dataclass(frozen=True, slots=True)
class AdapterUnnamed:
    """No new request shall name this adapter. Answered."""

    call_id: int
    name: str
    is_fixed: bool = False
    """It is one of the start, which has the name again at the next one."""


@dataclass(frozen=True, slots=True)
class AdapterNamesChanged:
    """The names by which requests ask for adapters, at a router that is not the owner; done before what follows."""

    adapters: tuple[AdapterFiles, ...]
    unnamed: tuple[str, ...]
    """Of those of the start."""


@dataclass(frozen=True, slots=True)
class AdapterAnswered:
    """What became of a call about an adapter. ``error``: why nothing has changed; empty: it is done, and durable."""

    call_id: int
    error: str = ""
    is_passing: bool = False
    """It may help to ask again."""
