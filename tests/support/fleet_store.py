"""A store in a :class:`fleet_world.Fleet`, as plain as can be: a flat table of blocks, and an exchange."""

from __future__ import annotations

from collections import deque

from msgspec import structs

from fleet_world import GEOMETRY, Fleet, Member
from instance_world import VOCAB
from memserve import _core
from memserve.base.config import ExchangeConfig, PoolConfig
from memserve.base.types import Role, Tier
from memserve.kv.identity import part_identities, state_identities
from memserve.kv.pool import BlockPool
from memserve.kv.state_snapshot import Lease
from memserve.kv.transfer.events import CancelPulls, Delivered, PagesPulled, PullPages, SealPages
from memserve.kv.transfer.exchange import Exchange
from memserve.protocol.events import MessageArrived, Send
from memserve.protocol.messages import Fetch, JoinAccepted, Offer, PeerGone, PeerJoined, Release
from memserve.protocol.peers import Peer, PeerInfo
from memserve.protocol.store import ForgetKv, KvUsed
from memserve_lab.sim.reference.device import OracleDevice


class FlatPool(BlockPool):
    """Finds blocks by identity alone."""

    def __init__(self, blocks, block_tokens):
        super().__init__(PoolConfig(blocks), block_tokens, "default")
        self.table = {}

    def names_of(self, offer):
        """Identities of what it offers; of a state, those that follow from its place."""
        names = split(self.identities(offer.tenant, offer.tokens))
        states = names_behind(names, offer.state_blocks, offer.part_blocks) if offer.state_blocks else []
        assert len(states) == offer.state_blocks
        return [*names, *states][offer.first_block :]

    def lend_state(self, tenant, tokens, blocks, part_blocks=0):
        names = split(self.identities(tenant, tokens)) if blocks else []
        for end in range(len(names), 0, -1):
            state = names_behind(names[:end], blocks, part_blocks)
            if all(name in self.table for name in state):
                found = [self.table[name] for name in state]
                self.retain(found)
                return Lease(found, end * self.block_tokens)
        return None

    def export_blocks(self, tenant, tokens, first_block=0):
        found = []
        for identity in split(self.identities(tenant, tokens))[first_block:]:
            if identity not in self.table:
                break
            found.append(self.table[identity])
        self.retain(found)
        return _core.BlockIds(found), _core.BlockIds()


def names_behind(names, blocks, part_blocks):
    """Of a state behind blocks of these names, or of a window's parts there."""
    if not part_blocks:
        return state_identities(names[-1], blocks)
    parts = [part_identities(name, part_blocks) for name in names[-(blocks // part_blocks) :]]
    return [name for part in parts for name in part]


class StoreMember(Member):
    """Takes every offer, gives to every fetch. ``mute``: it hears neither."""

    runs_requests = False

    def __init__(self, fleet, name="s", blocks=64, generation=1, host_id=""):
        self.fleet, self.peer = fleet, Peer(name, generation)
        kv = self.geometry = fleet.geometry
        self.pool = FlatPool(blocks, kv.block_tokens)
        self.exchange = Exchange(self.pool, kv, ExchangeConfig(), self.peer)
        self.device = OracleDevice(kv.block_tokens, blocks, 0, VOCAB, layers=kv.num_layers)
        self.plans, self.builds, self.masks, self.jobs, self.said, self.heard = (), (), (), deque(), [], []
        self.corrupt_pulls, self.mute, self.host_id = 0, False, host_id
        self.kept = set()
        self.forgotten = []
        self.used = []

    @property
    def info(self):
        return PeerInfo(
            self.peer, Role.STORE, "", "", self.geometry, 0, 0, 0, True, host_id=self.host_id, publishes_events=False
        )

    def post(self, event):
        if not isinstance(event, MessageArrived):
            outcomes = self.exchange.handle(event, self.fleet.now) if hasattr(event, "job_id") else []
        else:
            outcomes = self._listen(event.sender, event.message)
        for outcome in [*outcomes, *self.exchange.advance_transfers(self.fleet.now)]:
            if isinstance(outcome, Delivered):
                self._publish(outcome)
        for action in self.exchange.take_actions():
            if isinstance(action, Send):
                self._say(action.to, action.message)
            elif isinstance(action, SealPages | PullPages):
                self.jobs.append(action)
            else:
                assert isinstance(action, CancelPulls)
        self.exchange.check_invariants()

    def _listen(self, sender, message):
        now = self.fleet.now
        self.heard.append(message)
        if self.mute and isinstance(message, Offer | Fetch):
            return []
        match message:
            case JoinAccepted():
                return self.exchange.set_members(message.peers, now)
            case PeerJoined():
                return self.exchange.peer_joined(message.info, now)
            case PeerGone():
                return self.exchange.peer_removed(message.peer, now)
            case ForgetKv():
                for identity in split(message.identities):
                    self.forgotten.append(identity)
                    if identity in self.pool.table:
                        self.pool.release([self.pool.table.pop(identity)])
                return []
            case KvUsed():
                self.used.append(split(message.identities))
                return []
            case Offer(insert=True):
                names = self.pool.names_of(message)
                self.kept |= set(names) if message.private else set()
                if all(name in self.pool.table for name in names):
                    self._say(sender, Release(message.transfer_id))
                    return []
                message = structs.replace(message, insert=False)
        return self.exchange.handle(MessageArrived(sender, message), now)

    def _publish(self, done):
        offer = done.offer
        names = self.pool.names_of(offer)
        for name, block in zip(names, done.blocks, strict=True):
            if name in self.pool.table:
                self.pool.release([block])
            else:
                self.pool.table[name] = block

    def has(self, tokens, tenant=""):
        """Blocks of ``tokens`` that it has, from the first on."""
        blocks, _ = self.pool.export_blocks(tenant, tokens)
        self.pool.release(blocks)
        return len(blocks)

    def check_nothing_held(self):
        assert not self.exchange.transfers_open, self.exchange
        for block in self.pool.table.values():
            assert self.pool.ref_count(Tier.HBM, block) == 1


def with_store(host_id="", geometry=GEOMETRY, **configs):
    """Instances, and a store that all of them know."""
    fleet = Fleet(geometry, **configs)
    fleet.members["s"] = StoreMember(fleet, host_id=host_id)
    fleet.welcome_all()
    fleet.run()
    return fleet


def split(identities):
    return [identities[at : at + 16] for at in range(0, len(identities), 16)]


__all__ = ["PagesPulled", "StoreMember", "with_store"]
