"""Hints on KV that are done once, as the router passes them on: to the instances where the prefix lies, or to the one
that shall have it. The last of them that answers decides what the client is told.

Nothing of it is journalled: a router that starts anew knows of no hint, and the client is told that it is deferred.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memserve.base.errors import check
from memserve.base.types import Role, TokenArray
from memserve.base.units import NS_PER_S
from memserve.protocol.kv_hints import (
    NOTHING_CACHED,
    RESULTS_MAX,
    UNKNOWN_NAME,
    HintAction,
    HintOutcome,
    HintResult,
    HintResults,
    KvHint,
    KvHintDone,
    KvHinted,
    result_for,
)
from memserve.protocol.peers import Holder
from memserve.router.events import PrefixPinned, PrefixUnpinned
from memserve.router.members.loads import Ints
from memserve.router.members.registry import Member, MemberState
from memserve.router.outbox import Outbox, Timers
from memserve.router.placement.placer import Placer
from memserve.router.requests.sessions import MemberTables, NamedPrefixes

ANSWERED_WITHIN_NS = 30 * NS_PER_S
"""A hint is forgotten after this long: its message was lost, or its answers."""
COUNTED = "admission counts each block of memory: no KV is moved ahead of a request (--admission bounded)"
STORE = "store"
"""The destination that stands for all stores."""

_BEST_FIRST = list(HintOutcome)


@dataclass(slots=True)
class _OpenHint:
    waits_for: set[str] = field(default_factory=set)
    """Names of members."""
    best: HintResult | None = None


class HintRelay:
    """All hints under way."""

    def __init__(
        self, tables: MemberTables, named_prefixes: NamedPrefixes, placer: Placer, timers: Timers, outbox: Outbox,
        *, moves_kv: bool = True,
    ) -> None:  # fmt: skip
        self._registry, self._trees, self._loads = tables.registry, tables.trees, tables.loads
        self._named_prefixes, self._placer = named_prefixes, placer
        self._timers, self._outbox = timers, outbox
        self._moves_kv = moves_kv
        self._open: dict[str, _OpenHint] = {}
        self.results = HintResults()
        #: tenant, name and whole tokens of those that are retained, by hint
        self._retained: dict[str, tuple[str, str, int]] = {}

    def start_hint(self, event: KvHinted, now_ns: int) -> None:
        """A client asked for it."""
        if event.action is HintAction.RETAIN:
            self._retain(event, now_ns)
            return
        tokens, geometry = event.tokens, self._registry.geometry
        if tokens is None:
            tokens = self._named_prefixes.tokens_of(event.tenant, event.handle)
        if event.action is HintAction.RELEASE and event.handle:
            self._named_prefixes.unpin_prefix(PrefixUnpinned(event.handle, event.tenant))
        if tokens is None or geometry is None:
            self.results.put_result(event.hint_id, HintResult(HintOutcome.MISSING, 0, UNKNOWN_NAME))
            return
        if event.action is HintAction.RELEASE:
            whole = len(tokens) // geometry.block_tokens * geometry.block_tokens
            self._named_prefixes.release_retained(event.tenant, event.salt, tokens[:whole])
        identities = self._trees.prompt_identities(
            event.isolation, self._registry.namespace, tokens, geometry.block_tokens
        )
        matches = self._trees.match_prompt(identities, len(self._loads), behind=self._registry.behind_kv)
        blocks = self._loads.of_instances(matches.blocks) if matches.holders else None
        if not matches.holders:
            self.results.put_result(event.hint_id, NOTHING_CACHED)
        elif event.action is HintAction.PREFETCH or (event.action is HintAction.SHARE and event.destination != STORE):
            # an admitted request is promised its memory: nothing may take blocks that were not counted for anybody
            target = self._find_target(event, blocks) if self._moves_kv else COUNTED
            if isinstance(target, Member):
                holders = self._placer.holders_for(target, identities, matches)
                self._send_hint(event, HintAction.PREFETCH, tokens, {target: holders}, now_ns)
            else:
                self.results.put_result(event.hint_id, HintResult(HintOutcome.REJECTED, 0, target))
        else:
            members = self._members_with(blocks, all_of_them=event.action is HintAction.RELEASE)
            self._send_hint(event, event.action, tokens, dict.fromkeys(members, ()), now_ns)

    def _retain(self, event: KvHinted, now_ns: int) -> None:
        """A named prefix with a priority: it is kept track of, journalled, and moved as the others are."""
        tokens, geometry = event.tokens, self._registry.geometry
        if tokens is None:
            tokens = self._named_prefixes.tokens_of(event.tenant, event.handle)
        if tokens is None:
            self.results.put_result(event.hint_id, HintResult(HintOutcome.MISSING, 0, UNKNOWN_NAME))
            return
        pin = PrefixPinned(event.handle, event.tenant, tokens, event.ttl_ns, event.salt, event.priority)
        self._named_prefixes.pin_prefix(pin, now_ns)
        block_tokens = geometry.block_tokens if geometry is not None else 1
        self._retained[event.hint_id] = event.tenant, event.handle, len(tokens) // block_tokens * block_tokens
        if len(self._retained) > RESULTS_MAX:
            del self._retained[next(iter(self._retained))]

    def result_of(self, hint_id: str) -> HintResult | None:
        """What became of a hint. None: it is not known, yet or any more."""
        if hint_id not in self._retained:
            return self.results.result_of(hint_id)
        tenant, name, tokens = self._retained[hint_id]
        (kept_tokens,) = self._named_prefixes.pinned_tokens(tenant, (name,))
        if kept_tokens is None:
            return None
        return result_for(kept_tokens, tokens, "no more of it is cached") if kept_tokens else NOTHING_CACHED

    def _find_target(self, event: KvHinted, blocks: Ints | None) -> Member | str:
        """Which instance shall have the prefix: the one that is named, the one with most of it, or the one with the
        least to do. A text says why there is none."""
        if event.destination:
            member = self._registry.member_by_name(event.destination)
            if member is None or not member.shares_kv or not member.is_open:
                return f"there is no instance {event.destination[:64]!r}"
            return member
        if event.action is HintAction.SHARE:
            return "share needs a destination: an instance, or 'store'"
        able = [member for member in self._registry if member.shares_kv and member.is_open]
        if not able:
            return "no instance is live"
        of_prompts = [member for member in able if member.info.role is not Role.DECODE] or able
        work = dict(zip(of_prompts, self._loads.work_tokens(_numbers_of(of_prompts)).tolist(), strict=True))
        return min(of_prompts, key=lambda m: (-int(blocks[m.number]) if blocks is not None else 0, work[m], m.number))

    def _members_with(self, blocks: Ints | None, *, all_of_them: bool) -> list[Member]:
        """Those that have some of the prefix; else only those that have most of it."""
        if blocks is None or not blocks.any():
            return []
        numbers = np.flatnonzero(blocks > 0 if all_of_them else blocks == blocks.max())
        members = [self._registry.member_by_number(int(number)) for number in numbers]
        return [member for member in members if member.state is not MemberState.REJOINING]

    def _send_hint(
        self,
        event: KvHinted,
        action: HintAction,
        tokens: TokenArray,
        targets: dict[Member, tuple[Holder, ...]],
        now_ns: int,
    ) -> None:
        if not targets:
            self.results.put_result(event.hint_id, HintResult(HintOutcome.MISSING, 0, "no instance has any of it"))
            return
        for member, holders in targets.items():
            hint = KvHint(event.hint_id, action.value, event.isolation, tokens, holders)
            self._outbox.send(member.peer, hint)
        self._open[event.hint_id] = _OpenHint({member.name for member in targets})
        self._timers.arm(now_ns + ANSWERED_WITHIN_NS, self._forget_hint, event.hint_id)

    def _forget_hint(self, hint_id: str, now_ns: int) -> None:
        self._open.pop(hint_id, None)

    def on_done(self, member: Member, message: KvHintDone, now_ns: int) -> None:
        """``member`` says what became of a hint."""
        hint = self._open.get(message.hint_id)
        if hint is None or member.name not in hint.waits_for or message.outcome not in _BEST_FIRST:
            return
        hint.waits_for.discard(member.name)
        result = HintResult(HintOutcome(message.outcome), message.tokens, message.reason)
        best = hint.best
        if best is None or _BEST_FIRST.index(result.outcome) < _BEST_FIRST.index(best.outcome):
            hint.best = result
        if not hint.waits_for and hint.best is not None:
            self.results.put_result(message.hint_id, hint.best)
            del self._open[message.hint_id]

    def on_member_removed(self, member: Member) -> None:
        """It answers no more."""
        for hint_id, hint in list(self._open.items()):
            hint.waits_for.discard(member.name)
            if not hint.waits_for:
                lost = HintResult(HintOutcome.MISSING, 0, f"{member.name} is gone")
                self.results.put_result(hint_id, hint.best or lost)
                del self._open[hint_id]

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if a hint waits for nothing, or for a member that is gone."""
        for hint_id, hint in self._open.items():
            check(hint.waits_for, "hint {} waits for nothing", hint_id)
            names = {member.name for member in self._registry}
            check(hint.waits_for <= names, "hint {} waits for {}, of {}", hint_id, hint.waits_for, names)


def _numbers_of(members: list[Member]) -> Ints:
    return np.array([member.number for member in members], np.int64)
