"""The parts of a routing decision: candidates in numbers, what a request needs, the answer, and the choice by load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from memserve.base.types import Role, TransferMode
from memserve.kv.costs import CopyCurve, CostModel

OVERLOAD_FACTOR = 2
OVERLOAD_TOKENS = 8192
"""An overloaded instance has this many tokens of work, and ``OVERLOAD_FACTOR`` times those of the least loaded."""

DEFAULT_COSTS = CostModel()


class Candidate(msgspec.Struct, frozen=True):
    """An instance that could take a request, as the numbers that decide."""

    number: int
    name: str
    role: Role
    host_id: str = ""
    takes_requests: bool = True
    """False: it drains, or is gone."""
    prefill_tokens: int = 0
    """Uncomputed prompt tokens before this request."""
    sequences: int = 0
    """Sequences that decode there."""
    context_tokens: int = 0
    """Tokens in the contexts of those sequences: what each decode step reads."""
    room_tokens: int = 1 << 40
    """Tokens of KV that fit, evictable cache included, behind those that wait for it. Below 0: more wait than fit."""
    matched_tokens: int = 0
    """The prompt's prefix in its cache, HBM and DRAM."""
    dram_tokens: int = 0
    """How many of ``matched_tokens`` are in DRAM."""
    costs: CostModel = DEFAULT_COSTS
    """What computing and moving KV cost there, by the instance's own profile."""

    @property
    def work_tokens(self) -> int:
        """Outstanding work: tokens to be computed, and tokens to be read in each step."""
        return self.prefill_tokens + self.context_tokens


class Holding(msgspec.Struct, frozen=True):
    """A long prefix of the prompt in the cache of an instance or a store, which another instance may fetch."""

    number: int
    tokens: int
    host_id: str = ""
    disk_tokens: int = 0
    """Of ``tokens``: on the disks of a store alone."""
    disk: CopyCurve = DEFAULT_COSTS.disk
    """What reading those disks costs."""


class Ask(msgspec.Struct, frozen=True):
    """What a request needs."""

    prompt_tokens: int
    """Tokens to be computed or reused, a resumed request's generated tokens included."""
    max_tokens: int = 16
    sequences: int = 1
    token_bytes: int = 0
    """Bytes of KV of one token."""
    favourites: tuple[int, ...] = ()
    """Instances that know the session, or have its prefix pinned."""
    holdings: tuple[Holding, ...] = ()
    """Instances that hold much of the prompt, most of it first."""
    block_tokens: int = 1
    """Prefixes are cached, and KV is moved, in whole blocks of this size."""
    handoff_pieces: int = 1
    """Pieces of a block when it is handed to the decoder. 1: whole blocks. The number of layers: page by page."""
    state_blocks: int = 0
    """Blocks of the recurrent state that goes with KV, handed over or fetched. 0: layers keep KV alone."""
    least_lacking_ns: int | None = None
    """The shortest time in which any instance computes what it lacks of the prompt. None: the candidates are all."""


class Route(NamedTuple):
    """A decision."""

    first: Candidate
    """The instance that computes the prompt."""
    decode_at: Candidate | None
    """The instance that decodes; ``None``: the first one."""
    reason: str


class TransferChoice(NamedTuple):
    """How a prompt's KV goes from the first instance to the one that decodes."""

    mode: TransferMode = TransferMode.BY_REQUEST_AGG
    reason: str = ""
    """Empty: it is the same for all requests."""


IN_BLOCKS = TransferChoice()
"""Of requests whose KV goes nowhere, too."""


class Policy(Protocol):
    """Which instances run a request: what an entry point of ``memserve.routing_policies`` names."""

    def __call__(self, ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate], /) -> Route:
        """Choose ``Route.first`` among ``first`` (never empty), which may compute the prompt, and
        ``Route.decode_at`` among ``decoders``, or None: the first one decodes, too. With many instances these are the
        best in each respect.

        A pure function of its arguments: the simulator calls it under virtual time, and every router of a cluster for
        requests of its own. It is called for each attempt of a request in the router's one thread, so it must not wait
        for anything; 20 us are what the product's own take. Where a plug-in raises, or chooses what it was not offered,
        the request goes by load, and its explanation says why."""


def load_rank(ask: Ask, candidate: Candidate) -> tuple[int, bool, int]:
    """Less work first; ties go to an instance that knows the session, then to the lowest number."""
    return candidate.work_tokens, candidate.number not in ask.favourites, candidate.number


def least_loaded(ask: Ask, candidates: Sequence[Candidate]) -> Candidate:
    """The first by :func:`load_rank`; ``candidates`` must not be empty."""
    return min(candidates, key=lambda c: load_rank(ask, c))


def not_overloaded(candidates: Sequence[Candidate], least: Candidate) -> list[Candidate]:
    """Candidates whose cache may make up for their queue: all others have far more work than ``least``."""
    limit = OVERLOAD_FACTOR * least.work_tokens + OVERLOAD_TOKENS
    return [c for c in candidates if c.work_tokens <= limit]


def with_decoder(
    first: Candidate, why: str, decoders: Sequence[Candidate], choose: Callable[[Sequence[Candidate]], Candidate]
) -> Route:
    """The whole route once ``first`` is chosen: if that only prefills, ``choose`` picks the decoder."""
    if first.role is not Role.PREFILL or not decoders:
        return Route(first, None, why)
    decoder = choose(decoders)
    return Route(first, decoder, f"{why}; decodes at {decoder.name}, {decoder.work_tokens} tokens of work")
