"""Planted faults: the product with one of its safeguards taken out, to show which checker notices, and how soon.

Only a simulation does this, and only inside :func:`planted`. The product has no code for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as replace_struct

from memserve.answers import AnswerHeld, AnswerLog
from memserve.cluster import spans as spans_module
from memserve.cluster.answer_phases import Answer
from memserve.cluster.answers import Answers
from memserve.cluster.asking import AskingController
from memserve.cluster.events import ClusterAction
from memserve.cluster.outbox import DurabilityGate, Write
from memserve.cluster.registry import Member, Registry
from memserve.cluster.trees import Feed, Trees
from memserve.errors import UserError
from memserve.instance import batch as batch_module
from memserve.instance.batch import InflightPlan
from memserve.instance.events import Before, DropSegment, StepFinished, StepPlan
from memserve.instance.intake import RequestIntake
from memserve.instance.layered import LayerPlacer
from memserve.instance.member import MemberMachine
from memserve.instance.results import StepResults
from memserve.instance.router_addresses import RouterAddresses
from memserve.instance.router_changes import RouterChanges
from memserve.instance.routers import Routers
from memserve.instance.segments import HeldSegments
from memserve.instance.sequence import Group, Phase
from memserve.kv_transfer.context import Deadlines, Expiring
from memserve.kv_transfer.events import PagesPulled
from memserve.kv_transfer.receiver import Receiver
from memserve.mempool import pool as pool_module
from memserve.mempool.identity import DEFAULT_KEY, namespace_id
from memserve.messages import AskEvents, Expelled, Peer
from memserve.meta.store import Store
from memserve.sim.fuzz.store_plants import Swap, store_arrival, store_seal, store_write
from memserve.sim.fuzz.workers import Workers
from memserve.types import TokenOutput

if TYPE_CHECKING:
    from memserve.instance.sequence import Sequence


def _any_generation(self: Registry, peer: Peer) -> Member | None:
    return self.named(peer.name)


def _generation_check() -> list[Swap]:
    """Any process with the name of a member is taken for it."""
    return [(Registry, "get", _any_generation)]


def _never_due(self: Deadlines, now: int) -> Expiring | None:
    return None


def _lease_sweep() -> list[Swap]:
    """Offers, imports and fetches that are not ended live for ever."""
    return [(Deadlines, "pop_due", _never_due)]


def _one_namespace(tenant: str, fingerprint: str, key: bytes = DEFAULT_KEY) -> bytes:
    return namespace_id("", fingerprint, key)


def _namespace_check() -> list[Swap]:
    """All tenants find each other's KV."""
    return [(pool_module, "namespace_id", _one_namespace)]


def _never_asks(self: Trees, feed: Feed, now: int) -> AskEvents | None:
    return None


def _event_replay() -> list[Swap]:
    """The router does not ask for missed KV events."""
    return [(Trees, "_ask", _never_asks)]


def _lies(self: Store) -> None:
    return


def _fsync() -> list[Swap]:
    """The router's journal says that all is safe, and never syncs."""
    return [(Store, "sync", _lies)]


def _believes(self: Receiver, event: PagesPulled) -> None:
    _pulled(self, replace(event, error=""))


_pulled = Receiver.pulled


def _checksum() -> list[Swap]:
    """Pages are accepted as they come, even damaged ones."""
    return [(Receiver, "pulled", _believes)]


def _goes_through(self: DurabilityGate, actions: Iterable[ClusterAction]) -> list[ClusterAction | Write]:
    """All actions pass at once; records are still written."""
    held = _admit(self, actions)
    return [*held, *self.release(self._asked)]


_admit = DurabilityGate.admit


def _durability_gate() -> list[Swap]:
    """Messages leave before what they depend on is durable."""
    return [(DurabilityGate, "admit", _goes_through)]


def _stays_the_same(self: MemberMachine, sender: Peer, message: Expelled) -> None:
    return


def _expulsion() -> list[Swap]:
    """An instance that was expelled goes on as if nothing had happened."""
    return [(MemberMachine, "_leave_incarnation", _stays_the_same)]


def _never_leaves(self: MemberMachine, refused: str = "") -> None:
    return


def _leaving() -> list[Swap]:
    """An instance that drains never leaves."""
    return [(MemberMachine, "_leave", _never_leaves)]


def _never_turns(self: RouterAddresses, now: int) -> bool:
    return False


def _router_addresses() -> list[Swap]:
    """Instances look for a router at their first address alone."""
    return [(RouterAddresses, "turn", _never_turns), (RouterAddresses, "lead_to", _stays)]


def _stays(self: RouterAddresses, address: str, now: int) -> None:
    self.heard(now)


def _any_store(self: Registry, peer: Peer) -> Member | None:
    member = self.named(peer.name)
    return member if member is not None and member.is_store else _this_very_one(self, peer)


_this_very_one = Registry.get


def _store_generation() -> list[Swap]:
    """What a store said before it was killed is taken for what its next process says."""
    return [(Registry, "get", _any_store)]


def _up_to_date(self: MemberMachine, router: Peer) -> bool:
    return False


def _former_router() -> list[Swap]:
    """An instance follows a router after another one has taken its place."""
    return [(MemberMachine, "_is_outdated", _up_to_date)]


def _arrives_at_once(self: LayerPlacer, plan: StepPlan, *, keeps: bool) -> None:
    _move(self, plan, keeps=keeps)
    for sequence in self.sequences:
        kv = sequence.layered
        if kv is not None and kv.moving is not None and kv.moving.plan is plan:
            self._moves.settle(sequence, kv, kv.moving)


_move = LayerPlacer.move


def _has_come(self: LayerPlacer, sequence: Sequence) -> bool:
    return False


def _layer_arrival() -> list[Swap]:
    """A layer is read before it has arrived: where a plan moves pages to, its own rows look for them."""
    return [(LayerPlacer, "move", _arrives_at_once), (LayerPlacer, "arrives", _has_come)]


def _computed_whole(self: StepResults, plan: InflightPlan, event: StepFinished) -> None:
    _take_kept(self, plan, event)
    for sequence in plan.targets[-len(plan.drafts) :]:
        if sequence.phase is Phase.DECODING:
            sequence.out += [0] * (plan.drafts[sequence.draw[0]] - len(event.kept[sequence.draw[0]]))
            sequence.computed, sequence.left = sequence.known - 1, sequence.draws_left


_take_kept = StepResults._take_kept


def _draft_check() -> list[Swap]:
    """What was computed for drafts counts, whether they were drawn or not."""
    return [(StepResults, "_take_kept", _computed_whole)]


def _takes_anything(self: AnswerLog, output: TokenOutput) -> int:
    told = self._told.get(output.index)
    return _take_log(self, replace_struct(output, offset=len(told.tokens) if told is not None else 0))


_take_log = AnswerLog.take


def _answer_offsets() -> list[Swap]:
    """What is kept of an answer is what came, whether tokens came twice or were missing."""
    return [(AnswerLog, "take", _takes_anything)]


def _is_never_due(self: Answers, answer: Answer, now: int) -> None:
    return


def _answer_end() -> list[Swap]:
    """Requests whose clients never come again go on, and their answers are kept for ever."""
    return [(Answers, "_is_due", _is_never_due)]


def _says_nothing(self: HeldSegments) -> list[DropSegment]:
    self._dropped.clear()
    return []


def _segment_drop() -> list[Swap]:
    """A holder answers about a part of a sequence when its blocks are another sequence's."""
    return [(HeldSegments, "take_dropped", _says_nothing)]


def _last_part_alone(group: Group) -> Before | None:
    before = _before(group)
    return None if before is None else replace(before, segments=before.segments[1:])


_before = batch_module._before


def _segment_share() -> list[Swap]:
    """The first part of a sequence that instances share is left out of the attention of the others."""
    return [(batch_module, "_before", _last_part_alone)]


def _has_no_part(self: RequestIntake) -> bool:
    return False


def _by_number(members: Iterable[Member]) -> list[Member]:
    return sorted(members, key=lambda member: member.number)


def _segment_turns() -> list[Swap]:
    """Routers take the instances of shared sequences in orders of their own, and an instance takes parts of several."""
    return [(RequestIntake, "_has_part", _has_no_part), (spans_module, "in_turn", _by_number)]


def _says_it_runs(self: RouterChanges, held: AnswerHeld, router: Peer) -> AnswerHeld:
    return held


def _two_routers() -> list[Swap]:
    """Two routers own one attempt: an instance tells one that it runs there, and goes on for the other."""
    return [(RouterChanges, "_take", _says_it_runs)]


def _anyones(self: Routers, attempt_id: str, router: Peer) -> bool:
    return True


def _attempt_router() -> list[Swap]:
    """Any router may end an attempt, whosever it is."""
    return [(Routers, "is_of", _anyones)]


def _first_through(self: Workers, through_ns: list[int]) -> int:
    return min(through_ns)


def _worker_late() -> list[Swap]:
    """A plan's end is told when the first worker of the instance is through with it."""
    return [(Workers, "_meet", _first_through)]


def _for_ever(self: AskingController, now: int) -> bool:
    return True


def _keeps_grants(self: AskingController) -> None:
    return


def _stale_ledger() -> list[Swap]:
    """A follower goes on dispatching what was granted to it, after its lease and after it was expelled."""
    return [(AskingController, "_has_lease", _for_ever), (AskingController, "expelled", _keeps_grants)]


PLANTS: dict[str, Callable[[], list[Swap]]] = {
    "generation-check": _generation_check,
    "lease-sweep": _lease_sweep,
    "namespace-check": _namespace_check,
    "event-replay": _event_replay,
    "fsync": _fsync,
    "checksum": _checksum,
    "durability-gate": _durability_gate,
    "expulsion": _expulsion,
    "leaving": _leaving,
    "router-addresses": _router_addresses,
    "store-seal": store_seal,
    "store-arrival": store_arrival,
    "store-write": store_write,
    "store-generation": _store_generation,
    "former-router": _former_router,
    "layer-arrival": _layer_arrival,
    "draft-check": _draft_check,
    "answer-offsets": _answer_offsets,
    "answer-end": _answer_end,
    "segment-drop": _segment_drop,
    "segment-share": _segment_share,
    "segment-turns": _segment_turns,
    "worker-late": _worker_late,
    "two-routers": _two_routers,
    "attempt-router": _attempt_router,
    "stale-ledger": _stale_ledger,
}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Everything that is built and run inside lacks the safeguard ``name``; ``None``: nothing is missing. Raises
    :class:`UserError` for an unknown name."""
    if name is not None and name not in PLANTS:
        raise UserError(f"unknown planted fault {name!r}", hint=f"use one of {', '.join(PLANTS)}")
    swaps = PLANTS[name]() if name is not None else []
    kept = [(thing, attribute, thing.__dict__[attribute]) for thing, attribute, _ in swaps]
    try:
        for thing, attribute, other in swaps:
            setattr(thing, attribute, other)
        yield
    finally:
        for thing, attribute, before in kept:
            setattr(thing, attribute, before)
