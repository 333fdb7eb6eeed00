"""What ``memserve bench pool`` finds (level 4)."""

from __future__ import annotations

from dataclasses import dataclass, field

from memserve import __version__
from memserve.bench.sheet import Spent
from memserve.types import KVGeometry

ONE_CALL, CALL_EACH = "one call", "a call a piece"


@dataclass(frozen=True, slots=True)
class CallPoint:
    """A call of MemServe's Table 1, with so many blocks (figure 9)."""

    call: str
    blocks: int
    cached_ratio: float | None
    """Share of the blocks that the index has already; ``None``: the call knows no index."""
    spent: Spent
    link: str = ""
    """Between two processes: by which way."""


@dataclass(frozen=True, slots=True)
class IndexPoint:
    """What an index costs a request of so many tokens (figure 10)."""

    index: str
    prompt_tokens: int
    cached_ratio: float
    match: Spent
    insert: Spent
    check: Spent
    """Both together: the paper's "check index"."""


@dataclass(frozen=True, slots=True)
class ForwardPoint:
    """The model's part of a prefill without cache (figure 10)."""

    prompt_tokens: int
    spent: Spent


@dataclass(frozen=True, slots=True)
class Move:
    """KV between two processes, in so many pieces (figure 11)."""

    mover: str
    calls: str
    """``one call`` or ``a call a piece``."""
    layout: str
    """Of the prompt's KV; empty: pieces of one size, whatever they hold."""
    piece_bytes: int
    pieces: int
    spent: Spent

    @property
    def total_bytes(self) -> int:
        """Bytes of all pieces."""
        return self.piece_bytes * self.pieces

    @property
    def gb_per_s(self) -> float:
        """At the median."""
        return self.total_bytes / self.spent.median_ns


@dataclass(slots=True)
class PoolResults:
    """A whole run; lists grow as it goes."""

    command: str
    model: str
    geometry: KVGeometry
    tree_prompts: int
    """Prompts of 4,096 tokens that the index holds beside what is measured."""
    calls: list[CallPoint] = field(default_factory=list)
    index: list[IndexPoint] = field(default_factory=list)
    forward: list[ForwardPoint] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    partial: str | None = None
    version: str = __version__
