"""The members: by incarnation, with a small number for the trees and the arrays.

::

    Join --> LIVE --Drain--> DRAINING --Leave--> gone
              |  ^              |
              |  +--Join-- REJOINING          known to a router that was started anew
              +---- silence, or a newer incarnation of that name ----> gone
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from zlib import crc32

from memserve.base.errors import InvariantError, UserError, check
from memserve.base.states import KV_ALONE, BehindKv
from memserve.base.types import KVGeometry, Role
from memserve.kv.costs import CostModel, are_alike
from memserve.protocol.peers import Load, Peer, PeerInfo, members_digest

_ALIKE_SHARE = 0.15  # members whose costs differ by less count as alike
_REMEMBERED = 1024
"""Dead incarnations that are known as such. Older ones are as good as unknown: they may join again."""


class MemberState(enum.Enum):
    """What a member may be asked for."""

    LIVE = "live"
    DRAINING = "draining"  # finishes what it has
    REJOINING = "rejoining"  # was a member of the last router, and has not answered yet: is given nothing


@dataclass(slots=True)
class LinkTotals:
    """Messages counted at both ends of a link: a difference that stays is what was lost (``LossDetector``)."""

    dispatches: int = 0
    """Sent to the member."""
    dispatches_before: int = 0
    """Of them before its last heartbeat."""
    dispatches_lost: int = 0
    answers: int = 0
    """``Tokens`` and ``RequestRefused`` heard of it."""
    answers_lost: int = 0


@dataclass(slots=True, eq=False)
class Member:
    """One incarnation of an instance."""

    info: PeerInfo
    number: int
    """Smallest that was free: index of its row in every array, and its name in the trees."""
    joined_ns: int
    last_seen_ns: int
    state: MemberState = MemberState.LIVE
    load: Load = field(default_factory=Load)
    stats: bytes = b""
    knows_others: bool = False
    """Its last heartbeat told of other members than there are: news are under way, or, the second time, lost."""
    drains: bool = False
    """While it is rejoining: it was draining, and shall go on."""
    lacks_adapters: bool = False
    """It gets no requests before it has the adapters that the others have."""
    is_hidden: bool = False
    """Followers do not hear of it before that."""
    replaces: str = ""
    """The address of the member of its name in whose place it came, as a process that was started anew."""
    rival: Peer | None = None
    """Another process that asks to join with its name."""
    rival_since_ns: int = 0
    attempts: dict[str, None] = field(default_factory=dict)
    """All and only the attempts that fail when it dies, in order of dispatch."""
    totals: LinkTotals = field(default_factory=LinkTotals)

    costs: CostModel = field(init=False)
    """Its own: by its profile, then as it has learnt them; or the conservative defaults."""
    _reported_costs: bytes = field(init=False)
    costs_note: str = field(init=False)
    """Why its profile is not used; empty: it is, or there is none."""

    def __post_init__(self) -> None:
        self.costs, self._reported_costs = CostModel(), b""
        self.update_info(self.info)

    def update_info(self, info: PeerInfo) -> None:
        """What it says of itself when it joins, or joins again."""
        self.info, self.costs_note = info, ""
        self.learn_costs(info.costs)

    @property
    def has_own_costs(self) -> bool:
        """Whether its costs are its own: what was not understood tells nothing."""
        return bool(self._reported_costs) and not self.costs_note

    def learn_costs(self, encoded: bytes) -> bool:
        """What it says of its costs; empty: nothing. Returns whether they are others than before."""
        if not encoded or encoded == self._reported_costs:
            return False
        self._reported_costs = encoded
        try:
            self.take_costs(CostModel.from_json(encoded))
        except UserError as error:
            self.costs_note = f"its costs are not used: {error}"
            return False
        self.costs_note = ""
        return True

    def take_costs(self, costs: CostModel) -> None:
        """These are its costs from now on. To an engine no KV can be moved, whatever was measured elsewhere."""
        self.costs = costs if self.shares_kv else costs.without_links()

    @property
    def peer(self) -> Peer:
        """Name and generation."""
        return self.info.peer

    @property
    def name(self) -> str:
        """Equal for all incarnations."""
        return self.info.peer.name

    def conflicts_with(self, info: PeerInfo) -> bool:
        """Whether ``info`` is of another process that cannot have the same name: one of another role, or the one that
        is replaced. That one lives, so it was no restart: the two would expel each other for ever."""
        if self.state is MemberState.REJOINING or info.peer.name != self.name:
            return False
        is_replaced = info.address == self.replaces and info.address != self.info.address
        return is_replaced or info.role is not self.info.role

    @property
    def name_conflict(self) -> str:
        """Why another process cannot have its name."""
        has_it = f"the {self.info.role.value} at {self.info.address} has it"
        return f"two processes cannot both be called {self.name!r}, and {has_it}: take another --name"

    def contest_name(self, rival: Peer, now_ns: int) -> int:
        """``rival`` asks for its name again. Returns when it did so first."""
        if self.rival != rival:
            self.rival, self.rival_since_ns = rival, now_ns
        return self.rival_since_ns

    @property
    def is_store(self) -> bool:
        """Whether it holds KV, and runs no model."""
        return self.info.role is Role.STORE

    @property
    def has_model(self) -> bool:
        return self.info.role.has_model

    @property
    def shares_kv(self) -> bool:
        return self.info.role.shares_kv

    @property
    def is_open(self) -> bool:
        """Whether it takes new requests."""
        return self.state is MemberState.LIVE and not self.lacks_adapters

    def __repr__(self) -> str:
        return f"<Member {self.number} {self.name}:{self.peer.generation} {self.info.role} {self.state.value}>"


ORDERS = 1024
"""Orders in which routers number their members."""


def order_of(follower: str) -> int:
    """An order for the follower of that name. Knuth's factor spreads names that differ in one digit."""
    return (crc32(follower.encode()) * 2_654_435_761 >> 20) % ORDERS


class Registry:
    """Members by name, by number and in order of joining. Namespace and geometry of the first one that shares KV hold
    for all; an engine, a store and a router have none of their own.

    Of instances that are equally good, the one with the lowest number is chosen. Where several routers place requests
    in the same moment they shall not all choose the same, so each gives its numbers in another order: the n-th member,
    from 0 on, has the number ``n ^ order``.
    """

    def __init__(self, order: int = 0) -> None:
        """``order``: below ``ORDERS``, different for each router of a cluster; 0: the owner."""
        self._order = order
        self._members: dict[str, Member] = {}
        self._by_number: dict[int, Member] = {}
        self._free: list[int] = []  # places below the highest one that are free again
        self._dead: dict[Peer, None] = {}
        self._dead_order: deque[Peer] = deque()
        self._newest_dead_generations: dict[str, int] = {}
        #: :func:`members_digest` of the members
        self.members_digest = 0
        #: members that the owner has named and that this follower has not heard yet
        self.unheard_members: dict[str, None] = {}
        #: of the members with a model, while there are any
        self.namespace = ""
        self.geometry: KVGeometry | None = None
        #: what comes behind KV, as the same instance says
        self.behind_kv = KV_ALONE
        self._costs: CostModel | None = None  # that a member with a model has told last

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def get(self, peer: Peer) -> Member | None:
        """The member that is this very incarnation."""
        member = self._members.get(peer.name)
        return member if member is not None and member.peer == peer else None

    def member_by_name(self, name: str) -> Member | None:
        """The member of this name."""
        return self._members.get(name)

    def member_by_number(self, number: int) -> Member:
        """The member with this number."""
        member = self._by_number.get(number)
        if member is None:
            raise InvariantError(f"no member has the number {number}")
        return member

    def is_dead(self, peer: Peer) -> bool:
        """Whether ``peer`` was a member, and is no more."""
        return peer in self._dead

    def newest_generation(self, name: str) -> int:
        """The highest generation of ``name`` that is or was a member; 0: there was none."""
        member = self._members.get(name)
        return max(self._newest_dead_generations.get(name, 0), member.peer.generation if member is not None else 0)

    def newest_dead_generation(self, name: str) -> int | None:
        """The highest generation of ``name`` that was a member once, and is no more."""
        return self._newest_dead_generations.get(name)

    def refusal_reason(self, info: PeerInfo) -> str | None:
        """Why ``info`` cannot be a member; ``None``: it can."""
        if info.context_tokens < 1 and info.role.has_model:
            return f"its context makes no sense: {info.context_tokens} tokens"
        same_name = self._members.get(info.peer.name)
        if same_name is not None and info.peer.generation < same_name.peer.generation:
            return f"a newer incarnation of {info.peer.name!r} is a member"
        if same_name is not None and same_name.conflicts_with(info):
            return same_name.name_conflict
        has_others = any(member.shares_kv and member is not same_name for member in self)
        if not info.role.shares_kv or not has_others:
            return None
        if info.namespace != self.namespace:
            differ = f"{info.namespace!r}, the cluster's are {self.namespace!r}"
            return f"its model, weights, --kv-dtype or --kv-lower-dtype differ: {differ}"
        if info.geometry != self.geometry:
            return f"its KV geometry differs: {info.geometry}, the cluster's is {self.geometry}"
        return None

    def add_member(self, info: PeerInfo, now_ns: int) -> Member:
        """A new member. Its name must be free, and :meth:`refusal_reason` content."""
        check(info.peer.name not in self._members, "{} is a member already", info.peer.name)
        place = heapq.heappop(self._free) if self._free else len(self._members)
        member = Member(info, place ^ self._order, joined_ns=now_ns, last_seen_ns=now_ns)
        self._by_number[member.number] = member
        if member.shares_kv and not any(present_member.shares_kv for present_member in self):
            self.namespace, self.geometry = info.namespace, info.geometry
            self.behind_kv = BehindKv(info.state_blocks, info.windows)
        self._members[member.name] = member
        self.members_digest ^= members_digest([member.peer])
        if member.shares_kv and member.has_own_costs:
            self._costs = member.costs
        elif member.has_model and not member.has_own_costs and self._costs is not None:
            member.take_costs(self._costs)
        return member

    def learn_costs(self, member: Member, encoded: bytes) -> list[Member]:
        """``member`` says what it has learnt of its costs (``encoded``; empty: nothing). Returns the members whose
        costs are others now: those that have told nothing take the same ones, since with assumed costs they would get
        no request to learn from. Costs that hardly differ from those of another member become the same: else all would
        be placed on the one that has measured a little less."""
        if not member.learn_costs(encoded):
            return []
        model_members = [model_member for model_member in self if model_member is not member and model_member.has_model]
        alike = [model_member.costs for model_member in model_members if model_member.has_own_costs]
        alike = [costs for costs in alike if are_alike(member.costs, costs, _ALIKE_SHARE)]
        member.costs = alike[0] if alike else member.costs
        if not member.shares_kv:  # it says nothing of links, and others' models may be computed by other means
            return [member]
        self._costs = member.costs
        unsure = [model_member for model_member in model_members if not model_member.has_own_costs]
        for model_member in unsure:
            model_member.take_costs(self._costs)
        return [member, *unsure]

    def remove_member(self, member: Member, *, is_final: bool = True) -> None:
        """``member`` is gone; its number may be given to another. ``is_final``: this incarnation never comes again."""
        check(self._members.pop(member.name, None) is member, "{} is not a member", member)
        check(not member.attempts, "{} left while attempts depend on it", member)
        del self._by_number[member.number]
        heapq.heappush(self._free, member.number ^ self._order)
        self.members_digest ^= members_digest([member.peer])
        if is_final:
            self._mark_dead(member.peer)

    def _mark_dead(self, peer: Peer) -> None:
        self._dead[peer] = None
        self._dead_order.append(peer)
        self._newest_dead_generations[peer.name] = max(peer.generation, self._newest_dead_generations.get(peer.name, 0))
        if len(self._dead_order) > _REMEMBERED:
            oldest = self._dead_order.popleft()
            del self._dead[oldest]
            if self._newest_dead_generations.get(oldest.name) == oldest.generation:
                del self._newest_dead_generations[oldest.name]

    def remember_dead(self, peers: Iterable[Peer]) -> None:
        """``peers`` were members of an earlier router, and are no more."""
        for peer in peers:
            self._mark_dead(peer)

    def forgive_silence(self, now_ns: int) -> None:
        """The router itself was not running: no member's silence until now counts."""
        for member in self:
            member.last_seen_ns = now_ns

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if names, numbers and the digest do not agree."""
        for name, member in self._members.items():
            check(member.name == name, "{} is listed as {}", member, name)
            check(self._by_number.get(member.number) is member, "{} has not its own number", member)
            check(not self.is_dead(member.peer), "{} is dead", member)
            check(not member.shares_kv or member.info.namespace == self.namespace, "{} has another namespace", member)
        check(
            self.members_digest == members_digest(member.peer for member in self),
            "the digest is not that of the members",
        )
        used = len(self._by_number)
        check(used == len(self._members), "{} numbers are in use for {} members", used, len(self))
        places = sorted([*self._free, *(number ^ self._order for number in self._by_number)])
        check(places == list(range(len(places))), "free and used places are {}", places)
