"""How much each instance has to do, in arrays by its number.

Two sources are put together. The router knows the work that it sent and that has not ended. A heartbeat knows how far
the instance is, and of work that did not come from here, but it is old: work that was sent since is added. The larger
of the two counts. A burst between two heartbeats is spread by what was sent; a stuck queue shows in either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import add
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from memserve.base.errors import check
from memserve.base.types import Request, Role
from memserve.kv.costs import CostModel
from memserve.protocol.peers import Load
from memserve.router.admission.needs import Team
from memserve.router.placement.candidates import DEFAULT_COSTS
from memserve.router.placement.routing import native_prices, teams

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

ROLES = (Role.PREFILL, Role.DECODE, Role.COLOCATED, Role.ENGINE, Role.STORE, Role.ROUTER)  # those with a model first
ROLE_CODE = {role: code for code, role in enumerate(ROLES)}
_INSTANCES = (Role.PREFILL, Role.DECODE, Role.COLOCATED)
_UNUSED = -1

_Value = TypeVar("_Value", str, CostModel)


class Work(NamedTuple):
    """Work of one kind of request at one instance."""

    prefill_tokens: int = 0
    sequences: int = 0
    context_tokens: int = 0


_NO_WORK = Work()


class Charge(NamedTuple):
    """Work that an attempt put on an instance, to be taken off again."""

    number: int
    heartbeats: int
    """The instance's heartbeats before it: tells whether a heartbeat may know of it."""
    work: Work


class LoadTable:
    """Rows of :class:`Work` by instance number; unused numbers have role -1 and are closed."""

    def __init__(self) -> None:
        #: own, reported, since; by kind of work; by number
        self.tables: Ints = np.zeros((3, 3, 8), np.int64)
        self._name_tables()
        self._heartbeats = [0] * 8
        #: code of the role in ``ROLES``
        self.role = np.full(8, _UNUSED, np.int8)
        #: whether it takes new requests
        self.is_open: Mask = np.zeros(8, np.bool_)
        #: longest sequence that can run there
        self.context_limit = np.zeros(8, np.int64)
        #: smallest context limit of open members; 0: none is open
        self.context_limit_min = 0
        #: free or evictable blocks of HBM at the last heartbeat
        self.room_blocks = np.zeros(8, np.int64)
        #: code of the host, equal for members on one host; 0: unknown
        self.hosts = np.zeros(8, np.int64)
        self._host_codes: dict[str, int] = {}
        #: place of its costs in ``prices``
        self.profiles = np.zeros(8, np.int64)
        self._profile_codes = {CostModel(): 0}
        self.prices = native_prices(self._profile_codes)
        self._numbers: dict[Role, Ints] = {}
        self._members_changed()

    def __len__(self) -> int:
        """Rows, unused numbers included."""
        return len(self.role)

    def add_member(
        self,
        number: int,
        role: Role,
        context_tokens: int,
        hbm_blocks: int,
        host_id: str = "",
        costs: CostModel = DEFAULT_COSTS,
    ) -> None:
        """A member without work. ``host_id`` empty: it may be anywhere."""
        while number >= len(self):
            self._grow_tables()
        self.role[number] = ROLE_CODE[role]
        self.is_open[number] = True
        self.context_limit[number] = context_tokens
        self.room_blocks[number] = hbm_blocks
        self.hosts[number] = _code_of(host_id, self._host_codes, self.hosts, 1) if host_id else 0
        self.set_costs(number, costs)
        self._members_changed()

    def set_costs(self, number: int, costs: CostModel) -> None:
        """What computing and moving KV costs the member."""
        if costs not in self._profile_codes:
            _code_of(costs, self._profile_codes, self.profiles, 0)
            by_code = {code: profile for profile, code in self._profile_codes.items()}
            self.prices = native_prices(by_code.get(code, costs) for code in range(max(by_code) + 1))
        self.profiles[number] = self._profile_codes[costs]

    def close_member(self, number: int) -> None:
        """The member takes no new requests."""
        self.is_open[number] = False
        self._members_changed()

    def open_member(self, number: int) -> None:
        """The member takes new requests from now on."""
        self.is_open[number] = True
        self._members_changed()

    def remove_member(self, number: int) -> None:
        """The member is gone. All of its work must have been discharged."""
        check(not any(self.own_of(number)), "instance {} left with {}", number, self.own_of(number))
        self.role[number] = _UNUSED
        self.is_open[number] = False
        self.hosts[number] = self.profiles[number] = 0
        self.tables[:, :, number] = 0
        self._members_changed()

    def _members_changed(self) -> None:
        self._numbers = {role: np.flatnonzero(self.is_open & (self.role == ROLE_CODE[role])) for role in ROLES}
        #: instances that take requests, as :func:`sides_of` has them
        self.sides = sides_of({role: numbers for role, numbers in self._numbers.items() if len(numbers)})
        #: whether there are members whose KV is their own, and which do not answer every request
        self.has_engines = bool((self.role == ROLE_CODE[Role.ENGINE]).any())
        able = self.is_open & (self.role < ROLE_CODE[Role.STORE])
        self.context_limit_min = int(self.context_limit[able].min()) if able.any() else 0

    def open_numbers(self, role: Role) -> Ints:
        """Members of a role that take new requests, in order."""
        return self._numbers[role]

    def longest_context(self, request: Request) -> int:
        """The longest sequence that any open member that may run ``request`` can run; 0: there is none."""
        numbers = [self._numbers[role] for role in roles_for(request)]
        return int(self.context_limit[np.concatenate(numbers)].max(initial=0))

    def apply_heartbeat(self, number: int, load: Load) -> None:
        """``load`` came with a heartbeat: the member knows of nearly all that was sent before."""
        reported_work = Work(load.prefill_tokens_queued, load.sequences_running, load.context_tokens_running)
        for amount, reported, since in zip(reported_work, self._reported, self._since, strict=True):
            reported[number], since[number] = amount, 0
        self._heartbeats[number] += 1
        self.room_blocks[number] = load.hbm_blocks_available

    def charge_work(self, number: int, work: Work) -> Charge:
        """``work`` was sent to a member."""
        for amount, own_row, since in zip(work, self._own, self._since, strict=True):
            if amount:
                own_row[number] += amount
                since[number] += amount
        return Charge(number, self._heartbeats[number], work)

    def discharge_work(self, charge: Charge) -> None:
        """Work has ended, or will not be done there."""
        number, heartbeats, work = charge
        counted = self._since if heartbeats == self._heartbeats[number] else self._reported
        for amount, own_row, counted_row in zip(work, self._own, counted, strict=True):
            if amount:
                own_row[number] -= amount
                counted_row[number] = max(
                    0, counted_row[number] - amount
                )  # the instance may have reported that it has ended

    def work_of(self, number: int) -> Work:
        """Outstanding work of an instance, as far as is known."""
        own_work, reported, since = self.tables[:, :, number]
        return Work(*np.maximum(own_work, reported + since).tolist())

    def prefill_tokens_of(self, number: int) -> int:
        """Of that, tokens of prompts: quicker, for each request."""
        own_row, reported, since = self._own[0], self._reported[0], self._since[0]
        tokens: int = max(own_row[number], reported[number] + since[number])
        return tokens

    def work_tokens(self, numbers: Ints) -> Ints:
        """Outstanding work of each: tokens to be computed, and tokens to be read in each step."""
        own_work, reported, since = self.tables[:, :, numbers]
        prefill, _, context = np.maximum(own_work, reported + since)
        tokens: Ints = prefill + context
        return tokens

    def room_tokens(self, numbers: Ints, block_tokens: int) -> Ints:
        """Free or evictable room of each at its last heartbeat, less the contexts that did not run there yet: sent
        since, or waiting for memory. Below 0 where more wait than fit."""
        own_contexts, reported, since = self.tables[:, 2, numbers]
        waiting_tokens = np.maximum(own_contexts, reported + since) - reported
        room: Ints = self.room_blocks[numbers] * block_tokens - waiting_tokens
        return room

    def room_tokens_of(self, number: int, block_tokens: int) -> int:
        """The same of one: quicker."""
        own_contexts, reported, since = self._own[2][number], self._reported[2][number], self._since[2][number]
        room: int = self.room_blocks[number] * block_tokens - max(own_contexts, reported + since) + reported
        return int(room)

    def of_instances(self, blocks: Ints) -> Ints:
        """``blocks [n]`` cached at each member, without those that no message pins or moves: of stores and engines."""
        others = (self.role == ROLE_CODE[Role.STORE]) | (self.role == ROLE_CODE[Role.ENGINE])
        instance_blocks: Ints = np.where(others, 0, blocks)
        return instance_blocks

    def own_of(self, number: int) -> Work:
        """Work that was charged and not discharged."""
        return Work(*self.tables[0, :, number].tolist())

    def check_invariants(self, charges: Iterable[Charge], members: Mapping[int, tuple[Role, bool]]) -> None:
        """Raise :class:`InvariantError` unless every member is charged with exactly ``charges``. ``members``: by
        number their role, and whether they take new requests."""
        sums: dict[int, Work] = {}
        for charge in charges:
            sums[charge.number] = Work(*map(add, sums.get(charge.number, _NO_WORK), charge.work))
        roles, open_flags, own_work = self.role.tolist(), self.is_open.tolist(), self.tables[0].T.tolist()
        for number, (role, is_open) in members.items():
            expected, charged_work = sums.pop(number, _NO_WORK), tuple(own_work[number])
            check(
                charged_work == expected,
                "instance {} is charged {}, its attempts make {}",
                number,
                charged_work,
                expected,
            )
            check(roles[number] == ROLE_CODE[role], "instance {} has another role in the arrays", number)
            check(open_flags[number] == is_open, "instance {} is open: {}", number, not is_open)
        check(not sums, "instances that are gone are charged: {}", sums)
        unknown_numbers = [number for number, is_open in enumerate(open_flags) if is_open and number not in members]
        check(not unknown_numbers, "{} are open, and no member has such a number", unknown_numbers)

    def _name_tables(self) -> None:
        """Views in which a single number is changed ten times as quickly as in an array."""
        self._own, self._reported, self._since = [[memoryview(kind) for kind in table] for table in self.tables]

    def _grow_tables(self) -> None:
        old = len(self)
        self.tables = np.concatenate((self.tables, np.zeros((3, 3, old), np.int64)), axis=2)
        self._name_tables()
        self._heartbeats += [0] * old
        self.role = np.concatenate((self.role, np.full(old, _UNUSED, np.int8)))
        self.is_open = np.concatenate((self.is_open, np.zeros(old, np.bool_)))
        self.context_limit = np.concatenate((self.context_limit, np.zeros(old, np.int64)))
        self.room_blocks = np.concatenate((self.room_blocks, np.zeros(old, np.int64)))
        self.hosts = np.concatenate((self.hosts, np.zeros(old, np.int64)))
        self.profiles = np.concatenate((self.profiles, np.zeros(old, np.int64)))


def sides_of(able: Mapping[Role, Ints]) -> list[Team]:
    """Of instances by role: those that may compute a prompt, and those that may decode where others do that."""
    return [[(role, able[role]) for role in team if role in able] for team in teams(able) if team]


def roles_for(request: Request) -> tuple[Role, ...]:
    """Roles of members that may run ``request``."""
    return _INSTANCES if request.needs_instance else (*_INSTANCES, Role.ENGINE)


def _code_of(value: _Value, codes: dict[_Value, int], column: Ints, first: int) -> int:
    """A small number for ``value``, from ``first`` on. Codes of values that no member has are given again, so that they
    stay within the number of columns."""
    code = codes.get(value)
    if code is None:
        used = set(column.tolist())
        for unused in [key for key, code in codes.items() if code not in used]:
            del codes[unused]
        code = codes[value] = min(set(range(first, len(column) + 1)) - used)
    return code
