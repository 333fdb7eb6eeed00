"""The clients of a store: programs that keep values of their own beside the KV blocks.

A client sends the store a hello every second and is dropped when it is silent: what it has pinned is free then, and
what it asked for ends. Clients of one tenant share values. A tenant's keys follow from a secret that only its clients
are told, and its values carry its tag, which is compared each time: no tenant reads, replaces or deletes another's.

Work that looks at everything (purges, verification, listings) is done a bit at a time: nothing else waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from memserve import _core
from memserve.kv.store_shares import split_keys
from memserve.protocol.messages import Expelled, Leave, Refused
from memserve.protocol.peers import Peer
from memserve.protocol.store import (
    KEY_BYTES,
    KvModel,
    StoreCode,
    StoreDelete,
    StoreDone,
    StoreEntry,
    StoreGet,
    StoreHello,
    StoreList,
    StoreListing,
    StoreLook,
    StoreMessage,
    StorePlaces,
    StorePurge,
    StorePut,
    StoreStat,
    StoreStatus,
    StoreVerify,
    StoreWelcome,
)
from memserve.store.disks.events import Verified
from memserve.store.machine.block_pool import KV_SCOPE
from memserve.store.machine.client_io import Client, DelayedReplies, Gets, Puts
from memserve.store.machine.events import (
    AddClient,
    ExtentsSealed,
    Jobs,
    RemoveClient,
    SealExtents,
    StoreConfig,
    ValuesSent,
    ValuesTaken,
)
from memserve.store.machine.loads import Loads
from memserve.store.machine.values import Values

if TYPE_CHECKING:
    from memserve._core import Place


@dataclass(slots=True, eq=False)
class _Purge:
    client: Client
    call: int
    keys: Iterator[bytes]
    removed: int = 0


@dataclass(slots=True)
class _Check:
    """A verification: of the memory by this module, of the disks by ``Disks``."""

    keys: Iterator[bytes]
    memory_running: bool = True
    disks_running: bool = True
    checked: int = 0
    damaged: int = 0
    unread: int = 0


class Sweeps:
    """All of it that is under way."""

    def __init__(self, values: Values, jobs: Jobs, answers: DelayedReplies, config: StoreConfig) -> None:
        self._answers = answers
        self._values = values
        self._jobs = jobs
        self._config = config
        self._purges: deque[_Purge] = deque()
        self._check: _Check | None = None
        self._sealing: tuple[int, bytes, Place] | None = None
        """Job, key and place of the value in memory that is being compared, with a reference."""
        self._now = 0

    # -- purging

    def begin_purge(self, client: Client, message: StorePurge, now_ns: int) -> None:
        """Begin to forget the values of a client's tenant; everything is forgotten at once."""
        if message.everything:
            count = self._values.forget_everything(now_ns)
            self._send_answer(client, message.call, count, now_ns)
            return
        client.calls.add(message.call)
        self._purges.append(_Purge(client, message.call, iter(self._all_keys())))

    def _send_answer(self, client: Client, call: int, count: int, now_ns: int) -> None:
        reply = StoreDone(call, bytes([StoreCode.DONE]), count=count)
        self._answers.reply_when_durable(client, reply, now_ns + self._config.forget_ns)

    def _all_keys(self) -> list[bytes]:
        in_memory = split_keys(self._values.tier.keys())
        memory_keys = set(in_memory)
        return in_memory + [key for key in split_keys(self._values.disks.all_keys()) if key not in memory_keys]

    def _continue_purge(self, purge: _Purge, now_ns: int) -> bool:
        """Whether it has come to its end."""
        for _ in range(self._config.sweep_keys):
            key = next(purge.keys, None)
            if key is None:
                return True
            value = self._values.find_value(key)
            if value is not None and value.scope == purge.client.scope:
                purge.removed += self._values.forget_value(key, now_ns)
        return False

    # -- verifying

    def begin_verification(self, start: bool, now_ns: int) -> None:
        """Begin to compare everything, unless that is under way."""
        is_running = self._check is not None and (self._check.memory_running or self._check.disks_running)
        if start and not is_running:
            self._check = _Check(iter(split_keys(self._values.tier.keys())))
            self._values.disks.start_verification(now_ns)

    def disks_verified(self, outcome: Verified) -> None:
        """The disks are done."""
        if self._check is not None:
            self._check.disks_running = False
            self._check.checked += outcome.records
            self._check.damaged += outcome.damaged
            self._check.unread += outcome.unread

    def _compare_next(self) -> None:
        """One value in memory at a time."""
        check = self._check
        if check is None or self._sealing is not None or not check.memory_running:
            return
        for key in check.keys:
            place = self._values.tier.find(key, counts=False)
            if place is not None:
                self._sealing = (self._jobs.next_job(), key, place)
                self._jobs.add_action(SealExtents(self._sealing[0], ((place.offset, place.length),)))
                return
        check.memory_running = False

    def sealed(self, event: ExtentsSealed) -> bool:
        """A value was compared. False: the job is another part's."""
        if self._sealing is None or self._sealing[0] != event.job:
            return False
        _, key, place = self._sealing
        self._sealing = None
        if self._check is not None:
            self._check.checked += 1
        if event.seals[0] != place.seal:
            self._values.drop_damaged(key, place.offset)
            if self._check is not None:
                self._check.damaged += 1
        elif not place.verified and self._values.is_at(key, place.offset):
            self._values.counters.compared += 1
            self._values.tier.verified(key)
        self._values.tier.release(place.offset)
        self._compare_next()
        return True

    # -- listing

    def next_listing(self, client: Client, message: StoreList) -> StoreListing:
        """The next entries of a client's listing."""
        if message.after == 0:
            client.listing = self._all_keys()
        entries, position = [], message.after
        for key in client.listing[position : position + message.count]:
            position += 1
            value = self._values.find_value(key)
            if value is not None and (message.everything or value.scope == client.scope):
                name, location = value.name or b"", self._values.location_of(key)
                entries.append(StoreEntry(key, name, value.length, value.scope, location))
        if position >= len(client.listing):
            position, client.listing = 0, []
        return StoreListing(message.call, position, tuple(entries))

    # -- time

    def drop_client(self, client: Client) -> None:
        """The client is gone. A purge that it has begun goes on without it."""
        client.listing = []

    def advance_time(self, now_ns: int) -> None:
        """Go on by a bit."""
        self._now = now_ns
        self._compare_next()
        if self._purges and self._continue_purge(self._purges[0], now_ns):
            purge = self._purges.popleft()
            purge.client.calls.discard(purge.call)
            self._send_answer(purge.client, purge.call, purge.removed, now_ns)

    @property
    def next_deadline_ns(self) -> int | None:
        """Now, while there is something to go on with."""
        return self._now if self._purges else None

    def verification_numbers(self) -> dict[str, int]:
        """How far the last verification has come."""
        check = self._check
        if check is None:
            return {"verify_running": 0}
        running = check.memory_running or check.disks_running
        checked = check.checked + self._values.disks.verified_records
        return {
            "verify_running": int(running),
            "verify_checked": checked,
            "verify_damaged": check.damaged,
            "verify_unread": check.unread,
        }

    def referenced_extents(self) -> list[int]:
        """Extents with a reference of a verification."""
        return [] if self._sealing is None else [self._sealing[2].offset]


def tenant_key(tenant: str, key: bytes) -> bytes:
    """The secret of a tenant's keys, from the cluster's: 16 bytes."""
    return blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16, key=key, person=b"memserve-tenant").digest()


def tenant_scope(tenant: str, key: bytes) -> int:
    """The tag of a tenant's values: 32 bits, never that of KV blocks."""
    name = b"tenant " + tenant.encode("utf-8", "surrogatepass")
    return int.from_bytes(_core.siphash128(key, name)[:4], "little") or 1


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """What clients must share with a store, or hear of it."""

    key: bytes
    """Of the cluster's identities."""
    host_id: str
    """Of this host; clients with it read the memory in place."""
    model: KvModel
    """Whose KV is kept; without a namespace none is known yet."""


class Clients:
    """All clients, and what each asks for."""

    def __init__(
        self,
        values: Values,
        loads: Loads,
        jobs: Jobs,
        config: StoreConfig,
        identity: StoreIdentity,
        on_model: Callable[[Peer, KvModel], None],
    ) -> None:
        """``on_model`` takes the model of a client."""
        self._model, self._on_model = identity.model, on_model
        self._values = values
        self._jobs = jobs
        self._config = config
        self._key = identity.key
        self._host_id = identity.host_id
        self._clients: dict[Peer, Client] = {}
        self._numbers = 0
        self.value_bytes_max = min(config.value_bytes_max, values.tier.block_bytes * values.tier.blocks_total // 4)
        self.answers = DelayedReplies(values, jobs)
        self.puts = Puts(values, jobs, self.answers, self.value_bytes_max)
        self.gets = Gets(values, loads, jobs)
        self.sweeps = Sweeps(values, jobs, self.answers, config)

    def on_message(self, sender: Peer, message: StoreMessage, now_ns: int) -> None:
        """A client said something."""
        if isinstance(message, StoreHello):
            self._on_hello(sender, message, now_ns)
            return
        client = self._clients.get(sender)
        if client is None:
            self._values.counters.refused += 1
            self._jobs.send_message(sender, Expelled("this client is not known here: StoreHello comes first"))
            return
        client.last_seen_ns = now_ns
        match message:
            case StorePut() | StoreGet() | StoreDelete() | StorePurge():
                if len(client.calls) >= self._config.calls_max or message.call in client.calls:
                    self._jobs.send_message(sender, StoreDone(message.call, _all(message, StoreCode.NO_ROOM)))
                else:
                    self._begin_call(client, message, now_ns)
            case StoreLook(call, keys):
                self._jobs.send_message(sender, StorePlaces(call, self._locate_keys(client, keys)))
            case StoreStat(call):
                self._jobs.send_message(sender, StoreStatus(call, self.collect_numbers()))
            case StoreVerify(call, start):
                self.sweeps.begin_verification(start, now_ns)
                self._jobs.send_message(sender, StoreStatus(call, self.collect_numbers()))
            case StoreList():
                self._jobs.send_message(sender, self.sweeps.next_listing(client, message))
            case _:
                self._values.counters.refused += 1

    def _begin_call(self, client: Client, message: StorePut | StoreGet | StoreDelete | StorePurge, now_ns: int) -> None:
        match message:
            case StorePut():
                self.puts.begin_put(client, message, now_ns)
            case StoreGet():
                self.gets.begin_get(client, message, now_ns)
            case StoreDelete():
                self._delete_values(client, message, now_ns)
            case StorePurge():
                self.sweeps.begin_purge(client, message, now_ns)

    # -- coming and going

    def _on_hello(self, peer: Peer, hello: StoreHello, now_ns: int) -> None:
        client = self._clients.get(peer)
        if client is not None and client.hello != hello:
            self._drop_client(client)
            client = None
        if client is None:
            older = next((candidate for candidate in self._clients.values() if candidate.peer.name == peer.name), None)
            if older is not None and older.peer.generation > peer.generation:
                return
            if older is not None:
                self._drop_client(older)
            if hello.kv is not None and not self._accepts_model(peer, hello.kv):
                return
            if len(self._clients) >= self._config.clients_max:
                self._values.counters.refused += 1
                self._jobs.send_message(peer, Refused(f"{len(self._clients)} clients are served already: close some"))
                return
            client = self._add_client(peer, hello, now_ns)
        client.last_seen_ns = now_ns
        self._jobs.send_message(peer, client.welcome)

    def _accepts_model(self, peer: Peer, model: KvModel) -> bool:
        """Whether KV blocks of ``model`` can be kept here. While no model is known they are waited for: the client
        repeats its hello."""
        if self._model.namespace and model != self._model:
            self._values.counters.refused += 1
            self._jobs.send_message(peer, Refused(_incompatibility(model, self._model)))
            return False
        self._on_model(peer, model)
        return bool(self._model.namespace)

    def _add_client(self, peer: Peer, hello: StoreHello, now_ns: int) -> Client:
        tier, tenant = self._values.tier, hello.tenant
        self._numbers += 1
        is_here = bool(self._host_id) and hello.host_id == self._host_id and tier.arena is not None
        welcome = StoreWelcome(
            number=self._numbers,
            key=tenant_key(tenant, self._key),
            dram_bytes=tier.block_bytes * tier.blocks_total,
            value_bytes_max=self.value_bytes_max,
            data_path=tier.data_path if is_here else "",
            index_path=tier.index_path if is_here else "",
            client_path=tier.open_client(self._numbers) if is_here else "",
        )
        scope = tenant_scope(tenant, self._key) if hello.kv is None else KV_SCOPE
        client = Client(peer, self._numbers, hello, scope, welcome, now_ns)
        self._clients[peer] = client
        self._jobs.add_action(AddClient(peer, hello))
        return client

    def on_leave(self, peer: Peer) -> bool:
        """A process says good-bye. False: it was no client."""
        client = self._clients.get(peer)
        if client is not None:
            self._drop_client(client)
        return client is not None

    def _drop_client(self, client: Client) -> None:
        """Nothing is held for the client any more, but what a job of the host's still writes or reads."""
        client.is_gone = True
        del self._clients[client.peer]
        if client.welcome.client_path:
            self._values.tier.close_client(client.number)
        self.gets.drop_client(client)
        self.sweeps.drop_client(client)
        self._jobs.add_action(RemoveClient(client.peer))

    # -- small calls

    def _locate_keys(self, client: Client, keys: bytes) -> bytes:
        places = bytearray()
        for offset in range(0, len(keys) - KEY_BYTES + 1, KEY_BYTES):
            key = keys[offset : offset + KEY_BYTES]
            value = self._values.find_value(key)
            location = self._values.location_of(key) if value is not None and value.scope == client.scope else 0
            places.append(1 if location & 1 else location)
        return bytes(places)

    def _delete_values(self, client: Client, message: StoreDelete, now_ns: int) -> None:
        codes = bytearray()
        if len(message.keys) != KEY_BYTES * len(message.names):
            codes += bytes([StoreCode.BAD_CALL]) * len(message.names)
        else:
            for number, name in enumerate(message.names):
                codes.append(self._delete_value(client, message.keys[16 * number : 16 * number + 16], name, now_ns))
        self.answers.reply_when_durable(client, StoreDone(message.call, bytes(codes)), now_ns + self._config.forget_ns)

    def _delete_value(self, client: Client, key: bytes, name: bytes, now_ns: int) -> int:
        value = self._values.find_value(key)
        if value is None:
            return StoreCode.ABSENT
        if value.scope != client.scope or value.name not in (None, name):
            return StoreCode.BAD_CALL
        self._values.forget_value(key, now_ns)
        self._values.counters.deleted += 1
        return StoreCode.DONE

    # -- time and jobs

    def values_taken(self, event: ValuesTaken, now_ns: int) -> None:
        """The host has copied values out of a client's arena."""
        self.puts.on_values_taken(event, now_ns)

    def values_sent(self, event: ValuesSent) -> None:
        """The host has sent values."""
        self.gets.on_values_sent(event)

    def advance_time(self, now_ns: int) -> None:
        """Drop silent clients, answer calls whose time is over, go on with long work."""
        for client in [
            entry for entry in self._clients.values() if now_ns - entry.last_seen_ns >= self._config.silent_ns
        ]:
            self._values.counters.clients_dropped += 1
            self._drop_client(client)
        self.answers.send_due(now_ns)
        self.puts.expire_puts(now_ns)
        self.gets.expire_gets(now_ns)
        self.sweeps.advance_time(now_ns)

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`advance_time` is worth calling."""
        silent = [client.last_seen_ns + self._config.silent_ns for client in self._clients.values()]
        parts = (self.answers, self.puts, self.gets, self.sweeps)
        return min([*silent, *(due for part in parts if (due := part.next_deadline_ns) is not None)], default=None)

    def __len__(self) -> int:
        return len(self._clients)

    def collect_numbers(self) -> dict[str, int]:
        """Sizes and totals, by name."""
        tier = self._values.tier
        numbers = {
            "clients": len(self._clients),
            "dram_bytes": tier.block_bytes * tier.blocks_total,
            "dram_bytes_used": tier.bytes_used,
            "dram_values": tier.entries_used,
            "kv_blocks": len(self._values.log),
            "disk_bytes": self._values.disks.capacity_bytes,
            "index_bytes": tier.nbytes + self._values.disks.nbytes,
        }
        numbers |= self.sweeps.verification_numbers()
        numbers |= {f"dram_{name}": count for name, count in tier.counters().items()}
        numbers |= {f"disk_{name}": count for name, count in self._values.disks.counters().items()}
        return numbers | self._values.counters.as_dict()

    def drop_all(self) -> None:
        """The store ends: its clients are told."""
        for client in list(self._clients.values()):
            self._drop_client(client)
            self._jobs.send_message(client.peer, Leave())  # behind RemoveClient, which drops what is queued


def _all(message: StorePut | StoreGet | StoreDelete | StorePurge, code: StoreCode) -> bytes:
    match message:
        case StorePut():
            return bytes([code]) * len(message.pairs)
        case StoreGet() | StoreDelete():
            return bytes([code]) * len(message.names)
    return bytes([code])


def _incompatibility(client_kv: KvModel, own_kv: KvModel) -> str:
    """Why blocks of one model cannot lie among those of another."""
    if client_kv.geometry.block_tokens != own_kv.geometry.block_tokens:
        sizes = client_kv.geometry.block_tokens, own_kv.geometry.block_tokens
        return "its blocks have {} tokens, those that are kept here {}".format(*sizes)
    if client_kv.geometry.kv_dtype != own_kv.geometry.kv_dtype:
        dtypes = client_kv.geometry.kv_dtype, own_kv.geometry.kv_dtype
        return "its KV is kept as {} (--kv-dtype), what is kept here as {}".format(*dtypes)
    if client_kv.geometry != own_kv.geometry:
        return f"its KV has another shape or dtype than what is kept here: {client_kv.geometry} for {own_kv.geometry}"
    return "KV of other weights, or of an engine that shares none, is kept here"
