"""Hints on KV at the edge: the envelope of vLLM's proposals (vllm-project/vllm #53421), in requests and as calls.

::

    {"protocol_version": "0.1", "message_id": "turn-17", "actions": [
        {"action_id": "a", "action_type": "kv.retain", "payload": {"ttl_s": 60, "priority": 5}}]}

A hint is advice: an action that cannot be done is answered with the reason, and never fails the request that carries
it. In a request its target is the request's own prompt, with the answer, once that has ended; in a call the payload
names it: a session, a document, a prompt, messages or tokens.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from memserve.api.openai.interfaces import HintedEngine, ServingEngine
from memserve.base.fairness import TenantStore
from memserve.base.types import TokenArray
from memserve.base.units import ns_from_s
from memserve.protocol.kv_hints import HintAction, HintOutcome, HintResult, KvHinted

ACTIONS_MAX = 32
TTL_S = 300.0
"""For how long a prefix is retained where the hint does not say."""
TTL_S_MAX = 86_400.0
PRIORITY_MAX = 100.0
MESSAGES_MAX = 10_000
"""Envelopes whose outcomes are kept; beyond, the tenant with most loses its oldest."""
VERSION = "0.1"
ON_ITS_WAY = HintResult(HintOutcome.DEFERRED, 0, "it is on its way")

ShortName = Annotated[str, Meta(min_length=1, max_length=200)]


class KvHintAction(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One action of an envelope."""

    action_id: ShortName
    """A name of the action, which its result has."""
    action_type: ShortName
    """`kv.retain`, `kv.prefetch`, `kv.demote`, `kv.share` or `kv.release`."""
    action_version: str = "1.0"
    """`1.0`."""
    payload: dict[str, Any] = {}
    """Bounds: `ttl_s`, `priority`, `destination`; in a call a target: `session`, `document`, `prompt`, `tokens`, or
    `messages` and `tools`; and `cache_salt`."""


class KvHintsEnvelope(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /v1/kv_hints``, and the field `kv_hints` of requests."""

    protocol_version: Literal["0.1"]
    """`0.1`."""
    message_id: ShortName
    """A name of the envelope, by which `GET /v1/kv_hints/{message_id}` tells what became of it."""
    actions: Annotated[list[KvHintAction], Meta(max_length=ACTIONS_MAX)]
    """What is to be done, in this order."""


class HintPayload(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What an action may say: bounds, and, in a call, one target."""

    ttl_s: Annotated[float, Meta(gt=0)] | None = None
    priority: float | None = None
    destination: ShortName | None = None
    session: ShortName | None = None
    document: ShortName | None = None
    prompt: str | None = None
    tokens: list[int] | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    cache_salt: Annotated[str, Meta(max_length=512)] | None = None

    @property
    def targets(self) -> list[str]:
        """The names of those that it has."""
        names = "session", "document", "prompt", "tokens", "messages"
        return [name for name in names if getattr(self, name) is not None]


@dataclass(frozen=True, slots=True)
class PlannedHint:
    """An action that was read."""

    action_id: str
    action_type: str
    action: HintAction | None
    payload: HintPayload
    reason: str = ""
    """Why it is rejected, where ``action`` is None; else what of it is clipped."""

    @property
    def ttl_ns(self) -> int:
        """How long it is retained."""
        return ns_from_s(min(self.payload.ttl_s or TTL_S, TTL_S_MAX))

    @property
    def priority(self) -> float:
        """Within bounds."""
        return max(0.0, min(self.payload.priority or 0.0, PRIORITY_MAX))


def plan_hint(hint: KvHintAction, *, in_request: bool) -> PlannedHint:
    """What ``hint`` asks for, or why it is rejected."""
    name = hint.action_type.removeprefix("kv.")
    try:
        payload = msgspec.convert(hint.payload, HintPayload)
    except msgspec.ValidationError as error:
        return PlannedHint(hint.action_id, hint.action_type, None, HintPayload(), f"payload: {error}")
    # an action that is wrong does not refuse its envelope: each has an outcome of its own
    action = HintAction(name) if name in list(HintAction) else None
    reason = ""
    if action is None:
        reason = f"{hint.action_type[:64]!r} is not known; there are kv.{', kv.'.join(HintAction)}"
    # a later 1.x may have further fields: the payload refuses those that are not known, by name
    elif hint.action_version.split(".")[0] != "1":
        reason = f"version {hint.action_version[:32]!r} of it is not known; there is 1.0"
    elif in_request and payload.targets:
        reason = f"in a request the target is the request's own prompt: {payload.targets[0]} is for POST /v1/kv_hints"
    elif in_request and action is HintAction.PREFETCH:
        reason = "the request itself brings its prompt up; prefetch with POST /v1/kv_hints, before it"
    elif not in_request and len(payload.targets) != 1:
        reason = "give one of session, document, prompt, messages and tokens"
    if reason:
        return PlannedHint(hint.action_id, hint.action_type, None, payload, reason)
    if action is HintAction.RETAIN and (payload.priority or 0.0) < 0:
        action = HintAction.RELEASE
    return PlannedHint(hint.action_id, hint.action_type, action, payload, _clipping(payload))


def _clipping(payload: HintPayload) -> str:
    if (payload.ttl_s or 0.0) > TTL_S_MAX:
        return f"ttl_s is {TTL_S_MAX:g} at most"
    return f"priority is {PRIORITY_MAX:g} at most" if (payload.priority or 0.0) > PRIORITY_MAX else ""


@dataclass(frozen=True, slots=True)
class HintTarget:
    """The prefix that an action is for."""

    tenant: str
    handle: str
    tokens: TokenArray | None
    """None: those of the handle."""
    salt: str


@dataclass(slots=True)
class _HintRecord:
    planned: PlannedHint
    hint_id: str
    """Empty: the engine was never asked."""
    result: HintResult


class GivenHints:
    """The envelopes that were taken, and what became of each action."""

    def __init__(self) -> None:
        self._messages: TenantStore[list[_HintRecord]] = TenantStore(MESSAGES_MAX)

    def open_message(self, tenant: str, message_id: str) -> None:
        """An envelope has come; an earlier one of this name is forgotten."""
        self._messages.put(tenant, message_id, [])

    def knows_message(self, tenant: str, message_id: str) -> bool:
        """Whether the tenant has sent it, and it is not forgotten."""
        return self._messages.get(tenant, message_id) is not None

    def reject_hint(self, tenant: str, message_id: str, planned: PlannedHint, reason: str) -> None:
        """An action is not done."""
        self._put(tenant, message_id, _HintRecord(planned, "", HintResult(HintOutcome.REJECTED, 0, reason)))

    def give_hint(self, engine: ServingEngine, message_id: str, planned: PlannedHint, target: HintTarget) -> None:
        """Ask ``engine`` for an action."""
        if planned.action is None or not isinstance(engine, HintedEngine):
            self.reject_hint(target.tenant, message_id, planned, planned.reason or "the engine takes no hints")
            return
        hint_id = uuid.uuid4().hex
        engine.give_hint(
            KvHinted(
                hint_id,
                planned.action,
                target.tenant,
                target.handle,
                target.tokens,
                target.salt,
                planned.payload.destination or "",
                planned.ttl_ns,
                planned.priority,
            )
        )
        self._put(target.tenant, message_id, _HintRecord(planned, hint_id, ON_ITS_WAY))

    def _put(self, tenant: str, message_id: str, record: _HintRecord) -> None:
        message = self._messages.get(tenant, message_id)
        if message is not None:
            message.append(record)

    def update_results(self, engine: ServingEngine, tenant: str, message_id: str) -> bool:
        """Ask ``engine`` what has become of what is deferred; may wait for its thread. False: some of it still is."""
        message = self._messages.get(tenant, message_id) or []
        deferred = [record for record in message if record.result.outcome is HintOutcome.DEFERRED]
        if not deferred or not isinstance(engine, HintedEngine):
            return not deferred
        for record, result in zip(deferred, engine.hint_results([record.hint_id for record in deferred]), strict=True):
            if result is not None:
                record.result = _clipped(result, record.planned.reason)
        return all(record.result.outcome is not HintOutcome.DEFERRED for record in deferred)

    def cards_of(self, tenant: str, message_id: str) -> list[dict[str, Any]]:
        """The outcomes of an envelope's actions, as clients see them."""
        return [_card(record) for record in self._messages.get(tenant, message_id) or []]


def _clipped(result: HintResult, reason: str) -> HintResult:
    if result.outcome is HintOutcome.ACCEPTED and reason:
        return HintResult(HintOutcome.CLIPPED, result.tokens, reason)
    return result


def _card(record: _HintRecord) -> dict[str, Any]:
    card: dict[str, Any] = {
        "action_id": record.planned.action_id,
        "action_type": record.planned.action_type,
        "outcome": record.result.outcome.value,
        "tokens": record.result.tokens,
    }
    return card | ({"reason": record.result.reason} if record.result.reason else {})
