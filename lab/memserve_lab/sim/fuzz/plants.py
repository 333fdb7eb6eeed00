"""Planted faults: the product with one of its safeguards taken out, to show which checker notices, and how soon.

Only a simulation does this, and only inside :func:`planted`. The product has no code for it.

Planted faults of a store: each a safeguard that is taken out (``plants.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as replace_struct

from memserve.base.errors import UserError
from memserve.base.layer_kv import WindowPages
from memserve.base.types import TokenOutput
from memserve.instance.cluster.commands import RouterChanges
from memserve.instance.cluster.routers import Routers
from memserve.instance.cluster.shards import HeldSegments
from memserve.instance.events import Before, DropSegment, StepFinished, StepPlan
from memserve.instance.intake import RequestIntake
from memserve.instance.layerwise.placer import LayerPlacer
from memserve.instance.scheduler import batch as batch_module
from memserve.instance.scheduler.batch import InflightPlan
from memserve.instance.scheduler.results import StepResults
from memserve.instance.scheduler.sequence import Group, Phase
from memserve.instance.scheduler.states import RecurrentStates
from memserve.instance.scheduler.stripes import StripedPrompt
from memserve.journal.store import Store
from memserve.kv import pool as pool_module
from memserve.kv.identity import DEFAULT_KEY, namespace_id
from memserve.kv.pool import BlockPool
from memserve.kv.transfer.context import Deadlines, Expiring
from memserve.kv.transfer.events import PagesPulled
from memserve.kv.transfer.exchange import Exchange
from memserve.kv.transfer.receiver import Receiver
from memserve.kv.windows import WindowCache, WindowPart
from memserve.protocol.idempotency import AnswerHeld, AnswerLog
from memserve.protocol.member import MemberMachine, RouterAddresses
from memserve.protocol.messages import Expelled, Offer, QueryKvEvents, Span
from memserve.protocol.peers import Peer
from memserve.router.admission.follower import RemoteAdmission
from memserve.router.events import ClusterAction
from memserve.router.members.registry import Member, Registry
from memserve.router.outbox import DurabilityGate, Write
from memserve.router.placement import shards as spans_module
from memserve.router.placement.prefix_directory import MemberFeed, Trees
from memserve.router.requests.idempotency import Answer, ReplayLog
from memserve.store.disks import disk as disk_module
from memserve.store.disks import jobs as disk_steps
from memserve.store.disks.events import DiskDone, Written
from memserve.store.machine.events import ExtentsSealed
from memserve.store.machine.kv_blocks import KvBlocks
from memserve.store.machine.loads import Loads
from memserve.store.machine.values import Values
from memserve_lab.sim.fuzz.scenario_features import Workers

if TYPE_CHECKING:
    from memserve._core import Found, Place, SegmentLog
    from memserve.base.types import TokenArray
    from memserve.instance.scheduler.sequence import Sequence


Swap = tuple[Any, str, Any]
"""An object, the name of its attribute, and the attribute's replacement."""


def _same_head(log: SegmentLog, key: bytes, record: Found, job_done: DiskDone) -> bytes | None:
    return _name_if_same(log, key, record, replace(job_done, seal=record.seal) if job_done.ok else job_done)


_name_if_same = disk_steps.name_if_same


def _takes_as_sealed(self: Loads, event: ExtentsSealed, now_ns: int) -> bool:
    load = self._sealing.get(event.job)
    if load is not None and load.place is not None:
        event = replace(event, seals=(load.place.seal,))
    return _sealed(self, event, now_ns)


_sealed = Loads.sealed


def store_seal() -> list[Swap]:
    """A store takes what it reads, from a disk or in memory that it adopts, for what was written there."""
    return [(disk_module, "name_if_same", _same_head), (Loads, "sealed", _takes_as_sealed)]


def _publishes_at_once(self: KvBlocks, sender: Peer, offer: Offer, now_ns: int) -> None:
    _offered(self, sender, offer, now_ns)
    imported = self.exchange._receiver.open.get(offer.transfer_id)
    if imported is None or imported.placement is None or imported.placement.lease.blocks:
        return
    first, block_bytes = imported.offer.first_block, self._pool.block_bytes
    identities = self._pool.block_identities(offer.tenant, offer.tokens)[first:]
    for identity, block in zip(identities, imported.placement.blocks, strict=False):
        self._values.put_kv(identity, block * block_bytes, block_bytes, 0, now_ns, keep=False)


_offered = KvBlocks._offered


def store_arrival() -> list[Swap]:
    """A store publishes blocks before they have arrived."""
    return [(KvBlocks, "_offered", _publishes_at_once)]


def _is_written_at_once(self: Values, key: bytes, place: Place, now_ns: int, *, bypass: bool) -> None:
    was_written = key in self._writes
    _write_through(self, key, place, now_ns, bypass=bypass)
    if key in self._writes and not was_written:
        self.on_written(Written(key, True), now_ns)


_write_through = Values._write_through


def store_write() -> list[Swap]:
    """A store takes a value to be on a disk when the disk has begun to write it."""
    return [(Values, "_write_through", _is_written_at_once)]


def _any_generation(self: Registry, peer: Peer) -> Member | None:
    return self.member_by_name(peer.name)


def _generation_check() -> list[Swap]:
    """Any process with the name of a member is taken for it."""
    return [(Registry, "get", _any_generation)]


def _never_due(self: Deadlines, now_ns: int) -> Expiring | None:
    return None


def _lease_sweep() -> list[Swap]:
    """Offers, imports and fetches that are not ended live for ever."""
    return [(Deadlines, "pop_due", _never_due)]


def _one_namespace(tenant: str, fingerprint: str, key: bytes = DEFAULT_KEY) -> bytes:
    return namespace_id("", fingerprint, key)


def _namespace_check() -> list[Swap]:
    """All tenants find each other's KV."""
    return [(pool_module, "namespace_id", _one_namespace)]


def _never_asks(self: Trees, feed: MemberFeed, now_ns: int) -> QueryKvEvents | None:
    return None


def _event_replay() -> list[Swap]:
    """The router does not ask for missed KV events."""
    return [(Trees, "_query_events", _never_asks)]


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
    admitted = _admit(self, actions)
    return [*admitted, *self.release_actions(self._writes_requested)]


_admit = DurabilityGate.admit_actions


def _durability_gate() -> list[Swap]:
    """Messages leave before what they depend on is durable."""
    return [(DurabilityGate, "admit_actions", _goes_through)]


def _stays_the_same(self: MemberMachine, sender: Peer, message: Expelled) -> None:
    return


def _expulsion() -> list[Swap]:
    """An instance that was expelled goes on as if nothing had happened."""
    return [(MemberMachine, "_leave_incarnation", _stays_the_same)]


def _never_leaves(self: MemberMachine, refused: str = "") -> None:
    return


def _leaving() -> list[Swap]:
    """An instance that drains never leaves."""
    return [(MemberMachine, "_leave_cluster", _never_leaves)]


def _never_turns(self: RouterAddresses, now_ns: int) -> bool:
    return False


def _router_addresses() -> list[Swap]:
    """Instances look for a router at their first address alone."""
    return [(RouterAddresses, "try_next", _never_turns), (RouterAddresses, "switch_to", _stays)]


def _stays(self: RouterAddresses, address: str, now_ns: int) -> None:
    self.mark_contact(now_ns)


def _any_store(self: Registry, peer: Peer) -> Member | None:
    member = self.member_by_name(peer.name)
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


def _arrives_at_once(self: LayerPlacer, plan: StepPlan, decoding: list[Sequence], *, keeps: bool) -> None:
    _move(self, plan, decoding, keeps=keeps)
    for sequence in self.sequences:
        kv = sequence.layered
        if kv is not None and kv.moving is not None and kv.moving.plan is plan:
            self._moves.finish_copies(sequence, kv, kv.moving)


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
            sequence.out += [0] * (plan.drafts[sequence.draw[0]] - len(event.accepted_drafts[sequence.draw[0]]))
            sequence.computed, sequence.left = sequence.known_length - 1, sequence.draws_left


_take_kept = StepResults._take_kept


def _draft_check() -> list[Swap]:
    """What was computed for drafts counts, whether they were drawn or not."""
    return [(StepResults, "_take_kept", _computed_whole)]


def _takes_anything(self: AnswerLog, output: TokenOutput) -> int:
    sequence_log = self._sequences.get(output.index)
    return _take_log(self, replace_struct(output, offset=len(sequence_log.tokens) if sequence_log is not None else 0))


_take_log = AnswerLog.append_output


def _answer_offsets() -> list[Swap]:
    """What is kept of an answer is what came, whether tokens came twice or were missing."""
    return [(AnswerLog, "append_output", _takes_anything)]


def _is_never_due(self: ReplayLog, answer: Answer, now_ns: int) -> None:
    return


def _answer_end() -> list[Swap]:
    """Requests whose clients never come again go on, and their answers are kept for ever."""
    return [(ReplayLog, "_is_due", _is_never_due)]


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


def _has_no_part(self: RequestIntake, span: Span) -> bool:
    return False


def _by_number(members: Iterable[Member]) -> list[Member]:
    return sorted(members, key=lambda member: member.number)


def _segment_turns() -> list[Swap]:
    """Routers take the instances of shared sequences in orders of their own, and an instance takes parts of several."""
    return [(RequestIntake, "_has_part", _has_no_part), (spans_module, "in_turn", _by_number)]


def _opens_at_once(self: StripedPrompt, start: int) -> int:
    return self.num_layers


def _stripe_gate() -> list[Swap]:
    """A row of a prompt in stripes reads all layers of those before it as soon as their first one has come."""
    return [(StripedPrompt, "layers_before", _opens_at_once)]


def _says_it_runs(self: RouterChanges, answer: AnswerHeld, router: Peer) -> AnswerHeld:
    return answer


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
    return [(Workers, "_meet_at", _first_through)]


def _for_ever(self: RemoteAdmission, now_ns: int) -> bool:
    return True


def _keeps_grants(self: RemoteAdmission) -> None:
    return


def _stale_ledger() -> list[Swap]:
    """A follower goes on dispatching what was granted to it, after its lease and after it was expelled."""
    return [(RemoteAdmission, "_has_lease", _for_ever), (RemoteAdmission, "on_expelled", _keeps_grants)]


def _one_token_early(self: RecurrentStates, sequence: Sequence) -> None:
    _TAKE_END(self, sequence)
    if sequence in self._for_peers:
        slot, tokens, snapshot = self._taking[-1]
        self._taking[-1] = slot, max(1, tokens - 1), snapshot


_TAKE_END = RecurrentStates._take_end


def _state_position() -> list[Swap]:
    """What is handed over is the state of the token before."""
    return [(RecurrentStates, "_take_end", _one_token_early)]


def _behind_less(self: BlockPool, tenant: str, tokens: TokenArray, blocks: Items[int]) -> bool:
    return _INSERT_STATE(self, tenant, tokens[: max(self.block_tokens, len(tokens) - self.block_tokens)], blocks)


_INSERT_STATE = BlockPool.insert_state


def _state_anchor() -> list[Swap]:
    """A state that came from elsewhere is cached one block before its place."""
    return [(BlockPool, "insert_state", _behind_less)]


def _announce_at_once(
    self: Exchange, transfer_id: str, first_block: int, fence: int | None = None, *, whole: bool = False
) -> None:
    _ANNOUNCE_STATE(self, transfer_id, first_block, 0, whole=whole)


_ANNOUNCE_STATE = Exchange.announce_state


def _state_fence() -> list[Swap]:
    """A state is sealed before the plan that takes it has run: what lay in its blocks is handed over."""
    return [(Exchange, "announce_state", _announce_at_once)]


def _there(self: WindowCache, blocks: Items[int]) -> list[WindowPart]:
    first = self.pages.first_entry(len(blocks) * self.pages.block_tokens)
    return [self._by_anchor[block] for block in blocks[first:] if block in self._by_anchor]


def _window_hole() -> list[Swap]:
    """A sequence goes on wherever blocks are cached, whether or not its window is."""
    return [(WindowCache, "count_resumable", lambda self, blocks: len(blocks)), (WindowCache, "tail_of", _there)]


def _window_early() -> list[Swap]:
    """Parts are let go of while the next row still reads them."""
    return [(WindowPages, "kept_from", lambda self, tokens: tokens // self.block_tokens)]


def _state_drafts() -> list[Swap]:
    """Rows have drafts whether or not there is a state for each of them."""
    return [(RecurrentStates, "draft_room", lambda self, sequence, states_taken: self._block_tokens)]


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
    "stripe-gate": _stripe_gate,
    "worker-late": _worker_late,
    "two-routers": _two_routers,
    "attempt-router": _attempt_router,
    "stale-ledger": _stale_ledger,
    "state-drafts": _state_drafts,
    "state-position": _state_position,
    "state-anchor": _state_anchor,
    "state-fence": _state_fence,
    "window-hole": _window_hole,
    "window-early": _window_early,
}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Everything that is built and run inside lacks the safeguard ``name``; ``None``: nothing is missing. Raises
    :class:`UserError` for an unknown name."""
    if name is not None and name not in PLANTS:
        raise UserError(f"unknown planted fault {name!r}", hint=f"use one of {', '.join(PLANTS)}")
    swaps = PLANTS[name]() if name is not None else []
    originals = [(thing, attribute, thing.__dict__[attribute]) for thing, attribute, _ in swaps]
    try:
        for thing, attribute, replacement in swaps:
            setattr(thing, attribute, replacement)
        yield
    finally:
        for thing, attribute, before in originals:
            setattr(thing, attribute, before)
