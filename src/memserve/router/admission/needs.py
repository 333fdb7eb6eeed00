"""Whether a request is admitted now: what it needs, the reasons in words, and when to retry.

Under overload, requests are rejected quickly: a queue that is longer than can be served in time only adds to every
request's latency.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Literal, NamedTuple, Protocol

from msgspec import structs

from memserve.base.config import AdmissionConfig
from memserve.base.errors import UserError
from memserve.base.plugins import ADMISSION_CONTROLLERS, REASON_CHARS_MAX, check_arguments
from memserve.base.types import Request, Role
from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve.router.admission.ledger import Ints, Need, required_blocks

RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0
_SMOOTHING = 8  # the weight of a new measurement is 1/8


class Verdict(NamedTuple):
    """What is to become of a request that waits for admission."""

    kind: Literal["admit", "wait", "reject"]
    reason: str = ""
    """Why it waits, or is rejected, for its client."""
    retry_after_s: float | None = None
    """Of a rejected one: when to try again (429). None: it can never run (400)."""


ADMIT = Verdict("admit")


class Admitted(NamedTuple):
    """Requests that are active: admitted, and not ended."""

    requests: int
    tokens: int
    """Of their prompts and of the answers that they may get, as turns of tenants are counted."""


NONE_ADMITTED = Admitted(0, 0)


class AdmissionLoad(Protocol):
    """What is admitted at the moment, over all routers of a cluster."""

    def admitted(self) -> Admitted:
        """All together."""

    def admitted_of(self, tenant: str) -> Admitted:
        """Those of a tenant; of none that is not active."""

    def waiting(self) -> int:
        """Requests that wait."""


class AdmissionRule(Protocol):
    """When a request that waits is admitted. An entry point of ``memserve.admission_controllers`` names what makes one:
    it is called once with its settings (``--admission NAME:KEY=VALUE``, by key; both texts), before the router starts,
    and raises ``ValueError`` for wrong ones."""

    def __call__(self, request: Request, load: AdmissionLoad, now_ns: int, /) -> Verdict:
        """``request`` is the next one of its tenant, in the order of tenants' turns; one that waits holds up those of
        its own tenant alone. ``now_ns`` (ns) is the router's clock, which only goes forward.

        Asked when a request has come or ended, and while any waits every :data:`ASKED_EVERY_NS` with what happens next,
        within a second. A request that gets ``admit`` is admitted: a rule may count it. The limits of
        ``--max-active``, ``--admission-queue`` and ``--admission-wait`` hold beside it. It is called in the router's
        one thread, so it must not wait for anything, and under virtual time by the simulator, so it asks no clock.
        Where a plug-in raises, or answers with anything else, the request is judged by these limits alone, and
        ``memserve_plugin_admission_failures_total`` counts it."""


def admits_all(settings: Mapping[str, str]) -> AdmissionRule:
    """The product's own: beside ``--max-active`` and memory, which the queue looks at itself, nothing limits."""
    if settings:
        raise ValueError(f"it has no settings: {', '.join(settings)}")
    return lambda request, load, now_ns: ADMIT


def usable_verdict(verdict: Verdict) -> Verdict:
    """``verdict``, its texts and times within bounds. Raises ``TypeError`` and ``ValueError`` for what is none."""
    kind, reason, retry_after_s = verdict
    if kind not in ("admit", "wait", "reject"):
        raise ValueError(f"a verdict is admit, wait or reject, not {kind!r}")
    if kind == "admit":
        return ADMIT
    retry_s = None if retry_after_s is None else bounded_retry_s(float(retry_after_s))
    return Verdict(kind, str(reason)[:REASON_CHARS_MAX], retry_s)


ASKED_EVERY_NS = 50 * NS_PER_MS
"""A plug-in's rule may change its mind with time alone."""


def read_rule(config: AdmissionConfig) -> AdmissionRule:
    """The rule that ``--admission`` names. Raises :class:`UserError` where it cannot be had."""
    name, settings = config.controller
    make = ADMISSION_CONTROLLERS.load(name)
    try:
        rule: AdmissionRule = make(settings)
        check_arguments(rule, ("request", "load", "now_ns"))
    except Exception as error:
        hint = "its own documentation says which settings it has"
        raise UserError(f"--admission {config.mode[:200]}: {error}", hint=hint, param="admission") from error
    return rule


class Crowd(NamedTuple):
    """How many requests are active and waiting."""

    active: int
    active_max: int | None
    waiting: int
    waiting_max: int

    @property
    def is_full(self) -> bool:
        """Whether no more requests may be active."""
        return self.active_max is not None and self.active >= self.active_max

    @property
    def is_over_limit(self) -> bool:
        """Whether more requests wait than are allowed."""
        return self.waiting > self.waiting_max

    def describe_wait(self, room: str = "") -> str:
        """Why a request waits, or is rejected. ``room``: why there is no memory for it."""
        why = f"{self.active} requests are active, the most allowed" if self.is_full else room or "others are before it"
        return f"{why}; {self.waiting} wait, at most {self.waiting_max} may" if self.is_over_limit else why


def tokens_needed(request: Request, output_tokens_max: int, generated: int = 0) -> tuple[int, int]:
    """Tokens of KV that all sequences of ``request`` share, and those that each has for itself, in order.

    Of what it may still generate at most ``output_tokens_max`` count: nearly all answers end long before their limit,
    and memory kept for tokens that never come is wasted.
    """
    to_come = min(max(0, request.stop.max_tokens - generated), output_tokens_max)
    return len(request.prompt), generated + to_come


def whole_blocks(request: Request, output_tokens_max: int, unit_tokens: int, generated: int = 0) -> int:
    """Blocks of ``unit_tokens`` tokens for prompt and output. Sequences share the prompt's whole blocks (``n > 1``)."""
    shared, own_tokens = tokens_needed(request, output_tokens_max, generated)
    width = max(request.n, request.beam_width)
    whole = shared // unit_tokens if width > 1 else 0
    return whole + width * required_blocks(shared - whole * unit_tokens + own_tokens, unit_tokens)


def prompt_blocks(request: Request, unit_tokens: int, generated: int = 0) -> int:
    """Blocks of ``unit_tokens`` tokens on an instance that only computes the prompt."""
    return required_blocks(len(request.prompt) + generated, unit_tokens)


Team = list[tuple[Role, Ints]]
"""Instances that do one part of a request's work, by role and number; a request needs one of them."""


class MemoryNeed(NamedTuple):
    """What one request needs where it may run. Computed once and carried in its ``RequestState``, until instances or
    pins change or it has generated tokens."""

    prompt: int
    """Blocks of the known tokens: the need where only the prompt is computed."""
    whole: dict[Role, int]
    """Blocks with the output: the need where the request is decoded, by the instance's role."""
    names: tuple[bytes, ...]
    """Blocks of the prompt that are counted once for all that share them."""
    teams: list[Team]
    """One team that does everything, or one that prefills and one that decodes."""
    basis: tuple[int, int, bool]
    """The state from which the need was computed."""

    def need_at(self, role: Role, *, decodes: bool) -> Need:
        """The need on an instance of ``role``. ``decodes``: the instance also generates the output."""
        blocks = self.whole[role] if decodes else self.prompt
        return Need(blocks - len(self.names), self.names)

    def before_handover(self, role: Role) -> Need:
        """The need on an instance of ``role`` that computes the prompt, and decodes unless another team does."""
        return self.need_at(role, decodes=role is not Role.PREFILL or len(self.teams) < 2)

    def by_team(self) -> list[list[tuple[Need, Ints]]]:
        """For each team the needs by role, with the instances of that role."""
        return [[(self.before_handover(role), numbers) for role, numbers in team] for team in self.teams]


def cost_tokens(request: Request, output_tokens_max: int) -> int:
    """What ``request`` costs its tenant's share of service: every token that is read or written."""
    shared, own_tokens = tokens_needed(request, output_tokens_max)
    return max(1, shared + max(request.n, request.beam_width) * own_tokens)


def with_operator_settings(request: Request, config: AdmissionConfig) -> Request:
    """``request`` with the operator's settings: its tenant's weight and objectives, and whether its priority counts
    across tenants, as that of a deferrable one does in any case."""
    weight = dict(config.weights).get(request.tenant, 1) if config.weights else 1
    counts = config.priority_across_tenants or request.is_deferrable
    urgency = request.priority if counts else 0
    if config.objectives:
        by_tenant = {name: (ttft_ns or None, tpot_ns or None) for name, ttft_ns, tpot_ns in config.objectives}
        ttft_ns, tpot_ns = by_tenant.get(request.tenant, (None, None))
        request = structs.replace(
            request,
            slo_ttft_ns=ttft_ns if request.slo_ttft_ns is None else request.slo_ttft_ns,
            slo_tpot_ns=tpot_ns if request.slo_tpot_ns is None else request.slo_tpot_ns,
        )
    if (weight, urgency) == (request.weight, request.urgency):
        return request
    return structs.replace(request, weight=weight, urgency=urgency)


class ServiceTimes:
    """How long requests are active, learned from those that have ended: clients are told when to retry."""

    def __init__(self) -> None:
        self.mean_ns = 0
        self.samples = 0

    def add_sample(self, active_ns: int) -> None:
        """A request has ended that was active for ``active_ns``."""
        self.samples += 1
        share = min(self.samples, _SMOOTHING)  # the first samples are averaged
        self.mean_ns += (active_ns - self.mean_ns) // share

    def retry_after_s(self, ahead: int, at_once: int) -> float:
        """When a place is expected to be free behind ``ahead`` requests, ``at_once`` of which run together."""
        rounds = ahead // max(1, at_once) + 1
        return bounded_retry_s(rounds * self.mean_ns / NS_PER_S)


def bounded_retry_s(seconds: float) -> float:
    """``seconds`` within the limits of ``Retry-After``, rounded up to whole milliseconds."""
    return min(RETRY_MAX_S, max(RETRY_MIN_S, ceil(seconds * 1000) / 1000))
