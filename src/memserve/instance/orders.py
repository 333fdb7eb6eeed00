"""What the cluster wants of a request beside running it, and how far that has come (level 2)."""

from __future__ import annotations

from dataclasses import dataclass, field

from memserve.messages import Holder, Peer
from memserve.types import Request, TokenArray, TransferMode


@dataclass(slots=True)
class Orders:
    """Of one request. At most one of ``fetch_id``, ``import_id`` and ``offer_id`` is set."""

    decode_at: Peer | None = None
    """Who goes on after the first token; ``None`` = nobody, or nobody any more."""
    mode: TransferMode = TransferMode.BY_REQUEST_AGG
    return_kv: bool = False
    """The taker shall send back what it generates."""
    deadline_ns: int | None = None
    original: Request | None = None
    """A beam search to be handed over: the request that the taker gets. Here a substitute runs that draws nothing of
    use."""
    holders: list[Holder] = field(default_factory=list)
    """Who else may be asked for the prefix, best first."""
    fetch_id: str | None = None
    """The fetch that it waits for."""
    fetch_until_ns: int = 0
    """When it waits for no further holder."""
    import_id: str | None = None
    """The handoff by which it comes here."""
    offer_id: str | None = None
    """The handoff by which it leaves."""
    offered_blocks: int = 0
    """Blocks of that offer."""
    named_blocks: int = 0
    """Of them: named as computed, or about to be, layer by layer."""
    home: Peer | None = None
    """Who gets the generated KV back."""
    home_tokens: int = 0
    """How many of the tokens it has."""
    stopped: list[int] = field(default_factory=list)
    """Sequences whose stop string was found before they came here."""


@dataclass(frozen=True, slots=True)
class Homeward:
    """Generated KV on its way back: ``blocks[i]`` is block ``first_block + i`` of ``tokens``, one reference each."""

    home: Peer
    tenant: str
    tokens: TokenArray
    first_block: int
    blocks: list[int]
