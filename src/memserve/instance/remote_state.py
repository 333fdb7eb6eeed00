"""What other processes have to do with a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from memserve.messages import Holder, Peer
from memserve.types import Request, TransferMode


@dataclass(slots=True)
class RemoteState:
    """What other processes have to do with a request. At most one of ``fetch_id``, ``import_id`` and ``offer_id`` is
    set: a request moves one way at a time."""

    decode_at: Peer | None = None
    """The instance that decodes after the first token. None: this one."""
    mode: TransferMode = TransferMode.BY_REQUEST_AGG
    return_kv: bool = False
    """The decode instance sends back the KV of what it generates."""
    deadline_ns: int | None = None
    original: Request | None = None
    """A beam search to be handed over: the request that the decode instance gets. A substitute runs here and draws
    nothing of use."""
    holders: list[Holder] = field(default_factory=list)
    """Instances that may be asked for the prefix, best first."""
    fetch_id: str | None = None
    """The fetch that the request waits for."""
    fetch_until_ns: int = 0
    """When the request waits for no further holder."""
    import_id: str | None = None
    """The handoff that brings the request here."""
    offer_id: str | None = None
    """The handoff by which the request leaves."""
    offered_blocks: int = 0
    """Blocks of that offer."""
    named_blocks: int = 0
    """Of them: named as computed, or about to be, layer by layer."""
    home: Peer | None = None
    """The instance that gets the generated KV back."""
    home_tokens: int = 0
    """Tokens whose KV ``home`` has."""
    stopped: list[int] = field(default_factory=list)
    """Sequences with a stop string that was found before they came here."""
