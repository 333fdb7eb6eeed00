"""Parts of longer sequences that an instance computes and keeps for the instances that compute the other parts.

Such a part is a request that draws one token, which no client gets, and then stays as it is: it keeps its slot and its
blocks, and is never preempted, until the router cancels it, its deadline passes, or the device fails.
"""

from __future__ import annotations

from collections.abc import Callable

from memserve.base.errors import check
from memserve.base.types import FinishReason
from memserve.base.units import NS_PER_S
from memserve.instance.events import Action, DropSegment, HoldSegment
from memserve.instance.scheduler.sequence import Group
from memserve.instance.scheduler.state import SchedulerState
from memserve.protocol.events import Send
from memserve.protocol.messages import SegmentHeld
from memserve.protocol.peers import Peer

TELL_EVERY_NS = 2 * NS_PER_S
"""A router that does not know a segment (any more) hears of it, and cancels it."""


class HeldSegments:
    """The parts, from their dispatch to their end; and what the host and the router must hear of them."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        #: all and only the live requests that are kept for others, by id
        self.groups: dict[str, Group] = {}
        #: of those, the ones with complete KV: when the router heard of them last
        self.reported_ns: dict[str, int] = {}
        self._orders: list[HoldSegment] = []
        self._news: list[SegmentHeld] = []
        self._dropped: list[DropSegment] = []

    def hold_group(self, group: Group) -> None:
        """``group``, which has no sequence yet, is such a part."""
        group.muted, group.tokens_here, group.max_tokens = True, 1, 2  # one draw, behind which it goes no further
        self.groups[group.request.request_id] = group

    def report_complete(self, now_ns: int) -> None:
        """Look which parts are complete, and which are to be told again."""
        for name, group in self.groups.items():
            sequence = next(iter(group.sequences.values()))
            if name not in self.reported_ns and sequence.out:
                if not _is_striped(group):
                    self._orders.append(HoldSegment(name, list(sequence.blocks), sequence.prompt_tokens))
            elif name not in self.reported_ns or now_ns < self.reported_ns[name] + TELL_EVERY_NS:
                continue
            self.reported_ns[name] = now_ns
            self._news.append(SegmentHeld(name, sequence.prompt_tokens))

    def on_request_ended(self, group: Group) -> None:
        """Its blocks are free."""
        name = group.request.request_id
        if self.groups.get(name) is group:
            del self.groups[name]
            if self.reported_ns.pop(name, None) is not None and not _is_striped(group):
                self._dropped.append(DropSegment(name))

    def start_over(self) -> None:
        """The device has lost all KV: the router has the parts computed again."""
        for group in list(self.groups.values()):
            self._state.finish_group(group, FinishReason.ERROR)

    def take_dropped(self) -> list[DropSegment]:
        """What is to be done before the next plan."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def take_actions(self, router_of: Callable[[str], Peer | None]) -> list[Action]:
        """What the host is to answer queries about, and what the routers hear behind that."""
        news: list[Action] = [*self._orders]
        routed = [(router_of(message.request_id), message) for message in self._news]
        news += [Send(router, message) for router, message in routed if router is not None]
        self._orders.clear()
        self._news.clear()
        return news

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`report_complete` has something to repeat. None: never."""
        return min(self.reported_ns.values()) + TELL_EVERY_NS if self.reported_ns else None

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself."""
        groups = self._state.groups.items()
        live = {name: group for name, group in groups if group.span is not None and group.span.holds}
        check(live == self.groups, "parts of longer sequences are lost, or known twice")
        check(self.reported_ns.keys() <= self.groups.keys(), "a segment is held without its request")
        check(not (self._dropped or self._orders or self._news), "news of segments that were not told")
        for name in self.reported_ns:
            (sequence,) = self.groups[name].sequences.values()
            whole = len(sequence.blocks) * self._state.memory.block_tokens >= sequence.prompt_tokens
            check(whole and sequence.computed >= sequence.prompt_tokens, "{} is held, but not all there", sequence)


def _is_striped(group: Group) -> bool:
    """Whether others read its blocks, and ask nothing about them."""
    return group.span is not None and bool(group.span.stripes)
