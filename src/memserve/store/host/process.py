"""The process of a store: its memory, its files, its port, and the thread of its machine.

::

    mailbox, data port, disks' threads, value workers --events--> [loop: StoreMachine] --actions--> all of them

One life serves one model's KV. When the first member shows another one than the store was started with, the life ends
and the next begins, in this process.

Where a store runs and what it is given, and what it remembers of the model whose KV it keeps.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from memserve import _core
from memserve.base.config import MemberConfig
from memserve.base.errors import UserError
from memserve.base.types import KVGeometry, Role, Tier
from memserve.base.units import ns_from_s
from memserve.journal.folder import write_private
from memserve.kv.costs import CostModel
from memserve.kv.identity import kv_secret
from memserve.kv.transfer.events import CancelPulls, PullPages, SealPages
from memserve.protocol.events import MessageArrived, Send
from memserve.protocol.member import MemberMachine
from memserve.protocol.member_events import (
    AddPeer,
    ChangeGeneration,
    ConnectRouter,
    DrainRequested,
    GenerationChanged,
    LogWarning,
    RemovePeer,
)
from memserve.protocol.messages import AnyMessage
from memserve.protocol.peers import Peer, PeerInfo
from memserve.protocol.store import STORE
from memserve.store.disks.disks import Disks
from memserve.store.disks.events import DisksConfig
from memserve.store.host.disks import DiskHost
from memserve.store.host.files import first_folder
from memserve.store.host.memory_jobs import CarriedValues, ValueJobs, put_values, take_values
from memserve.store.machine.events import (
    AddClient,
    Ended,
    RemoveClient,
    SealExtents,
    SendValues,
    ServeModel,
    StoreAction,
    StoreEvent,
    TakeValues,
)
from memserve.store.machine.machine import StoreMachine
from memserve.system.loop import EngineStopped, MachineLoop
from memserve.system.process import STALL_S, HealthFile, HealthState, new_generation
from memserve.system.secrets import as_followed
from memserve.transport.data_port import open_data_port
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.member_place import MemberPlace, health_of, next_incarnation

_MODEL = "memserve-store.json"
_SHARED = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlace(MemberPlace):
    """What a store's process is given."""

    role: Role = Role.STORE
    dram_bytes: int
    folders: tuple[tuple[str, int], ...]
    """A folder of each disk, or a backend and its location, and the bytes that it takes there."""
    disks: DisksConfig
    is_memory_kept: bool = True
    """What is in memory outlives a process that is killed: the next store of this name takes it over."""

    @property
    def memory_name(self) -> str:
        """Of its shared memory: one store of this name, secret and user finds what it has left."""
        parts = f"{os.getuid()} {self.name} {kv_secret(as_followed(self.secret).initial_value)}".encode()
        letters = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in self.name[:24])
        return f"{letters}-{hashlib.blake2b(parts, digest_size=8).hexdigest()}"


class StoredModel(msgspec.Struct, frozen=True):
    """Whose KV a store keeps."""

    namespace: str
    geometry: KVGeometry


NO_MODEL = StoredModel("", KVGeometry(1, 1, 16, 16, "float32"))
"""Until a member with a model is seen: blocks of 4 KiB."""


def _path_of(place: StorePlace) -> Path:
    folder = first_folder(place.folders)
    return folder / _MODEL if folder is not None else _SHARED / f"memserve-store-{place.memory_name}.json"


def known_model(place: StorePlace) -> StoredModel:
    """Whose KV the last store here has kept, or ``NO_MODEL``. Raises :class:`UserError` when that cannot be read."""
    path = _path_of(place)
    try:
        return msgspec.json.decode(path.read_bytes(), type=StoredModel)
    except FileNotFoundError:
        return NO_MODEL
    except (msgspec.MsgspecError, UserError):
        return NO_MODEL  # the next member says it again
    except OSError as error:
        hint = "give a folder that this user may read and write"
        raise UserError(f"cannot read {path}: {error.strerror}", hint=hint, param="ssd") from None


def remember_model(place: StorePlace, model: StoredModel) -> None:
    """For the next start. Raises :class:`UserError` when it cannot be written."""
    path = _path_of(place)
    try:
        write_private(path, msgspec.json.encode(model).decode())
    except OSError as error:
        hint = "give a folder that this user may write"
        raise UserError(f"cannot write {path}: {error.strerror}", hint=hint, param="ssd") from None


def forget_model(place: StorePlace) -> None:
    """At an orderly end without disks: nothing is left that it could describe."""
    if not place.folders:
        _path_of(place).unlink(missing_ok=True)


log = logging.getLogger(__name__)

_CLOSE_S = 10.0


class StoreRun:
    """A store for one model's KV, from its start to its end."""

    def __init__(
        self, place: StorePlace, model: StoredModel, self_peer: Peer, carried: CarriedValues | None = None
    ) -> None:
        """``carried``: values of the life before. Raises :class:`UserError` when memory, disks or address cannot be
        had."""
        self._place = place
        self._tier: _core.MemoryTier | None = None
        self.ended = threading.Event()
        self.next_model: StoredModel | None = None
        """Whose KV the next life keeps. None: there is no next life."""
        self._failure: UserError | None = None
        self._opened: list[Callable[[], object]] = []  # how to close what is open, in the order of opening
        try:
            self._open_parts(model, self_peer, carried or CarriedValues())
        except BaseException:
            self._close_all()
            if self._tier is not None and not self._tier.adopted:
                self._tier.unlink()
            raise

    def _open_parts(self, model: StoredModel, self_peer: Peer, carried: CarriedValues) -> None:
        place, geometry = self._place, model.geometry
        self._tier = tier = _open_memory(place, geometry.block_bytes)
        if not place.is_memory_kept:
            tier.unlink()  # the files' names alone: those that know their descriptors read on
        _put_carried(tier, carried)
        arena = tier.arena
        assert arena is not None
        self._disks = DiskHost(list(place.folders), place.disks)
        self._opened.append(self._close_disks)
        curve = self._disks.read_curve()
        costs = CostModel(disk=curve).to_json() if curve is not None else b""
        self._values = ValueJobs(arena, self._post_event, self._send_message, lambda: self._loop.has_waiting)
        self._opened.append(self._values.close)
        link = place.link if model.namespace else "shm"  # until there is KV to be read, no other host needs a way
        arenas, kv_codec = {Tier.DRAM: arena}, place.disks.kv_codec
        self._port = open_data_port(link, geometry, arenas, self._post_event, place, kv_codec=kv_codec)
        self._opened.append(self._port.close)
        self._lock = threading.Lock()
        with self._lock:  # messages may arrive as soon as there is a mailbox
            self._mailbox = ZmqMailbox(self_peer, place, self._on_message, alias=STORE.name)
            self._opened.append(self._mailbox.close)
            info = self._port.describe(_peer_info(tier, model, self_peer, self._mailbox.address, costs, place))
            member = MemberMachine(info, place.join, MemberConfig())
            disks = Disks(self._disks.logs, place.disks)
            self.machine = StoreMachine(tier, disks, info, place.identity_key, member)
            self._loop: MachineLoop[StoreEvent] = MachineLoop(
                self.machine, self._perform_step, on_broken=self._on_broken, name="memserve-store"
            )
            self._disks.start(self._post_event, arena.address, arena.nbytes, tier.unit_bytes)
            self._perform_actions(self.machine.start(time.monotonic_ns()))
        self._loop.start()

    @property
    def address(self) -> str:
        """Where clients reach it, ``tcp://host:port``."""
        return self._mailbox.address

    @property
    def router(self) -> Peer | None:
        """The router that has accepted the store."""
        return self.machine.member.router

    @property
    def self_peer(self) -> Peer:
        """The present incarnation."""
        return self.machine.member.self_peer

    def read_numbers(self) -> dict[str, int]:
        """Sizes and totals, as ``memserve store stat`` shows them."""
        return self._loop.query_machine(self.machine.clients.collect_numbers)

    @property
    def health_state(self) -> HealthState | None:
        """What it is to its cluster. None: its loop hangs, or has ended."""
        member = self.machine.member
        try:
            return self._loop.query_machine(lambda: health_of(member), STALL_S)
        except (TimeoutError, EngineStopped):
            return None

    def request_end(self, patience_s: float, why: str = "") -> None:
        """Write what is in memory alone, for ``patience_s`` at most, then end. A signal's handler may call it."""
        self._loop.post_event(DrainRequested(ns_from_s(patience_s), why))

    def close(self, *, is_orderly: bool) -> None:
        """Stop all threads. ``is_orderly``: what is in memory is given up, else the next store here takes it over.

        Raises :class:`UserError` when the store has broken or was refused."""
        self._loop.close(_CLOSE_S)
        self._close_all()
        if is_orderly and self._failure is None and self._tier is not None and self._place.is_memory_kept:
            self._tier.unlink()
        if self._failure is not None:
            raise self._failure

    def values_to_carry(self) -> CarriedValues:
        """Behind :meth:`close`: values of clients that the next life would not find where they are."""
        tier, model = self._tier, self.next_model
        if tier is None or model is None or model.geometry.block_bytes == tier.block_bytes:
            return CarriedValues()
        return take_values(tier, self.machine.values.disks.__contains__)

    def _close_all(self) -> None:
        while self._opened:
            self._opened.pop()()

    def _close_disks(self) -> None:
        if not self._disks.close(_CLOSE_S):
            log.error("a disk does not end what it was asked for: it is left behind")

    # -- other threads

    def _post_event(self, event: StoreEvent) -> None:
        self._loop.post_event(event)

    def _on_message(self, sender: Peer, message: AnyMessage) -> None:
        with self._lock:
            loop = self._loop
        loop.post_event(MessageArrived(sender, message))

    def _send_message(self, to: Peer, message: AnyMessage) -> None:
        self._mailbox.send(to, message)

    # -- the loop's thread

    def _perform_step(self, event: StoreEvent, actions: list[StoreAction], spent_ns: int) -> None:
        self._perform_actions(actions)

    def _perform_actions(self, actions: list[StoreAction]) -> None:
        for action in actions:
            match action:
                case Send(to, message):
                    self._mailbox.send(to, message)
                case SealExtents() | TakeValues() | SendValues():
                    self._values.start(action)
                case SealPages() | PullPages() | CancelPulls():
                    self._port.start(action)
                case AddClient() | RemoveClient() | AddPeer() | RemovePeer() | ConnectRouter():
                    self._update_peers(action)
                case ChangeGeneration():
                    self._change_generation(action)
                case LogWarning(text):
                    log.warning("%s", text)
                case ServeModel(namespace, geometry, of):
                    self.next_model = StoredModel(namespace, geometry)
                    log.info("keeps KV of the model of %s from now on", of)
                    self.request_end(self._place.drain_s)
                case Ended(refused):
                    self._on_end(refused)
                case _:
                    self._disks.perform_action(action)

    def _update_peers(self, action: AddClient | RemoveClient | AddPeer | RemovePeer | ConnectRouter) -> None:
        match action:
            case AddClient(client, hello):
                self._mailbox.connect(client, hello.address)
                self._values.add_client(client, hello)
            case RemoveClient(client):
                self._mailbox.disconnect(client)
                self._values.remove_client(client)
            case AddPeer(info):
                self._mailbox.connect(info.peer, info.address)
                self._port.add_peer(info)
            case RemovePeer(peer):
                self._mailbox.disconnect(peer)
                self._port.remove_peer(peer)
            case ConnectRouter(router, address):
                self._mailbox.connect(router, address)

    def _change_generation(self, action: ChangeGeneration) -> None:
        self_peer = next_incarnation(self.self_peer, action)
        self._mailbox.restart_as(self_peer)
        self._post_event(
            GenerationChanged(self._port.describe(msgspec.structs.replace(self.machine.info, peer=self_peer)))
        )

    def _on_end(self, refused: str) -> None:
        if refused:
            hint = "a store has the cluster's secret, and a name of its own: --name"
            self._failure = UserError(f"the router refuses this store: {refused}", hint=hint, param="join")
        self.ended.set()

    def _on_broken(self) -> None:
        self._failure = UserError("the store broke; its log says why", hint="please report it")
        self.ended.set()


class StoreLives:
    """A store from its start to its end: a life for each model whose KV it keeps."""

    def __init__(self, place: StorePlace, on_ready: Callable[[StoreRun], None]) -> None:
        """``on_ready`` is called once, when it serves."""
        self._place, self._on_ready = place, on_ready
        self._run: StoreRun | None = None  # None: before the first life, between two, and behind the last
        self._ends = False

    @property
    def present(self) -> StoreRun | None:
        """Its present life."""
        return self._run

    @property
    def router(self) -> Peer | None:
        """The router that has accepted it."""
        run = self._run
        return run.router if run is not None else None

    def request_end(self, patience_s: float, why: str = "") -> None:
        """As :meth:`StoreRun.request_end`, whenever it is called: behind the present life there is no other one."""
        self._ends = True
        if (run := self._run) is not None:  # else the next life ends as it begins
            run.request_end(patience_s, why)

    def run_all(self) -> None:
        """Live until it is told to end. Raises :class:`UserError` when it cannot be started, or the router refuses
        it."""
        health = self._place.open_health()
        keeps_memory = self._place.is_memory_kept
        model: StoredModel | None = known_model(self._place) if keeps_memory else NO_MODEL
        generation, carried = 0, CarriedValues()
        while model is not None:
            is_first, generation = not generation, max(generation + 1, new_generation())
            self._run = run = StoreRun(self._place, model, Peer(self._place.name, generation), carried)
            if self._ends:
                run.request_end(0.0)
            elif is_first:
                self._on_ready(run)
            while not run.ended.wait(1.0):  # short waits: a signal's handler runs between them
                _report_health(health, run)
            generation = max(generation, run.self_peer.generation)
            model = run.next_model if not self._ends else None
            if model is not None and keeps_memory:
                remember_model(self._place, model)
            run.close(is_orderly=model is None)
            carried = run.values_to_carry() if model is not None else CarriedValues()
            self._run = None
            del run
            gc.collect()  # machine and memory are a cycle, and the next life takes over the memory's files
        if keeps_memory:
            forget_model(self._place)
        if health is not None:
            health.remove_file()


def run_store(place: StorePlace, on_ready: Callable[[StoreRun], None]) -> None:
    """A store that is this process: signals end it, and the end of what it outlives. Raises as
    :meth:`StoreLives.run_all`."""
    lives = StoreLives(place, on_ready)
    place.follow_signals(lives.request_end)
    place.end_when_orphaned(lambda: lives.router)
    lives.run_all()


def _report_health(health: HealthFile | None, run: StoreRun) -> None:
    if health is not None and (standing := run.health_state) is not None:
        health.write_state(standing)


def _open_memory(place: StorePlace, block_bytes: int) -> _core.MemoryTier:
    nbytes = place.dram_bytes // block_bytes * block_bytes
    if nbytes < 2 * block_bytes:
        message = f"{place.dram_bytes:,} bytes of memory hold less than two blocks of {block_bytes:,} bytes"
        raise UserError(message, hint=f"give at least --dram {2 * block_bytes}", param="dram")
    try:
        return _core.MemoryTier(nbytes, block_bytes, name=place.memory_name)
    except OSError as error:
        hint = "give a smaller --dram (df /dev/shm tells the room), or end the store that has this --name"
        raise UserError(f"cannot have {nbytes:,} bytes of shared memory: {error}", hint=hint, param="dram") from None


def _put_carried(tier: _core.MemoryTier, carried: CarriedValues) -> None:
    put_values(tier, carried)
    if carried.values:
        log.info("%s values of clients are in memory as before", f"{len(carried.values):,}")
    if carried.lost:
        log.warning(
            "%s values of clients were in memory alone and are lost: the memory is another, with blocks of %s bytes",
            f"{carried.lost:,}",
            f"{tier.block_bytes:,}",
        )
    carried.values.clear()


def _peer_info(
    tier: _core.MemoryTier, model: StoredModel, self_peer: Peer, address: str, costs: bytes, place: StorePlace
) -> PeerInfo:
    """What members are told of a store."""
    return PeerInfo(
        peer=self_peer,
        role=Role.STORE,
        address=address,
        namespace=model.namespace,
        geometry=model.geometry,
        hbm_blocks=0,
        dram_blocks=tier.blocks_total if model != NO_MODEL else 0,
        context_tokens=0,
        caching=True,
        pid=os.getpid(),
        publishes_events=True,
        costs=costs,
        model=place.model,
    )
