"""Whether a request is let in now (level 1, row C6): the reasons in words, and when to come again.

Overload rejects quickly: a line that is longer than can be served in time only adds to everybody's tail.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from msgspec import structs

from memserve.config import AdmissionConfig
from memserve.policy.bestfit import Need, required_blocks
from memserve.types import Request
from memserve.units import NS_PER_S

RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0
IDENTITY_BYTES = 16
_SMOOTHING = 8  # a new measurement weighs 1/8


class Crowd(NamedTuple):
    """How full it is."""

    active: int
    active_max: int | None
    waiting: int
    waiting_max: int

    @property
    def is_full(self) -> bool:
        """No more requests may run at once."""
        return self.active_max is not None and self.active >= self.active_max

    @property
    def overflows(self) -> bool:
        """More wait than may."""
        return self.waiting > self.waiting_max

    def reason(self, room: str = "") -> str:
        """Why a request waits, or is turned away. ``room``: why there is no memory for it."""
        why = f"{self.active} requests are active, the most allowed" if self.is_full else room or "others are before it"
        return f"{why}; {self.waiting} wait, at most {self.waiting_max} may" if self.overflows else why


def tokens_needed(request: Request, output_tokens_max: int, generated: int = 0) -> tuple[int, int]:
    """Tokens of KV that all sequences of ``request`` share, and those that each has for itself, in order.

    Of what it may still generate at most ``output_tokens_max`` count: nearly all answers end long before their limit,
    and memory that is kept for what never comes serves nobody.
    """
    to_come = min(max(0, request.stop.max_tokens - generated), output_tokens_max)
    return len(request.prompt), generated + to_come


def full_need(request: Request, output_tokens_max: int, unit_tokens: int, generated: int = 0) -> Need:
    """Blocks of ``unit_tokens`` tokens for prompt and output. Sequences share the prompt's whole blocks (``n > 1``)."""
    shared, own = tokens_needed(request, output_tokens_max, generated)
    width = max(request.n, request.beam_width)
    whole = shared // unit_tokens if width > 1 else 0
    return Need(whole + width * required_blocks(shared - whole * unit_tokens + own, unit_tokens))


def prompt_need(request: Request, unit_tokens: int, generated: int = 0) -> Need:
    """The same where only the prompt is computed: a prefill instance."""
    return Need(required_blocks(len(request.prompt) + generated, unit_tokens))


def with_reuse(need: Need, identities: bytes) -> Need:
    """The same need where the prompt's whole blocks have names: shared with whoever holds the same prefix."""
    count = min(len(identities) // IDENTITY_BYTES, need.blocks)
    names = tuple(identities[at : at + IDENTITY_BYTES] for at in range(0, count * IDENTITY_BYTES, IDENTITY_BYTES))
    return Need(need.blocks - count, names)


def cost_tokens(request: Request, output_tokens_max: int) -> int:
    """What serving ``request`` counts in its tenant's share: every token that is read or written."""
    shared, own = tokens_needed(request, output_tokens_max)
    return max(1, shared + max(request.n, request.beam_width) * own)


def on_terms(request: Request, config: AdmissionConfig) -> Request:
    """``request`` on the operator's terms: the weight of its tenant, and whether its priority counts among all."""
    weight = dict(config.weights).get(request.tenant, 1) if config.weights else 1
    urgency = request.priority if config.priority_across_tenants else 0
    if (weight, urgency) == (request.weight, request.urgency):
        return request
    return structs.replace(request, weight=weight, urgency=urgency)


class ServiceTimes:
    """How long requests are active, learned from those that have ended: by it clients are told when to come again."""

    __slots__ = ("mean_ns", "samples")

    def __init__(self) -> None:
        self.mean_ns = 0
        self.samples = 0

    def learn(self, active_ns: int) -> None:
        """A request has ended that was active for so long."""
        self.samples += 1
        share = min(self.samples, _SMOOTHING)  # the first ones count as their mean
        self.mean_ns += (active_ns - self.mean_ns) // share

    def retry_after_s(self, ahead: int, at_once: int) -> float:
        """When a place is expected to be free behind ``ahead`` others, ``at_once`` of which run together."""
        rounds = ahead // max(1, at_once) + 1
        return bounded_retry_s(rounds * self.mean_ns / NS_PER_S)


def bounded_retry_s(seconds: float) -> float:
    """What a client is told: a time that it takes seriously, and whole milliseconds that are not too few."""
    return min(RETRY_MAX_S, max(RETRY_MIN_S, ceil(seconds * 1000) / 1000))
