"""A journal in etcd, and the election of the one router that may write it.

::

    /memserve/NAME/router                  the active router; lives as long as its lease
    /memserve/NAME/current                 number of the journal
    /memserve/NAME/journal/NUMBER/PIECE    its bytes, in order, at most PIECE_BYTES each

The journal is the one that lies in a file otherwise, so everything that is tested of it holds here. Every write is a
transaction that compares the key ``router`` with the one that this process has created: a router that was paused, and
with a successor meanwhile, cannot write any more, whatever it believes.

The key's lease ends ``LEASE_S`` after the last sign of life. Routers that wait look for the key, and the first to
create it anew is active.

Each call goes to the member of etcd that answered last. A member that is gone, hangs, or is cut off from the others has
its turn again when all others have failed. Without a quorum no member answers, and calls fail within ``_CALL_S``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from memserve.base.errors import UserError
from memserve.journal.store import MediumFailed

log = logging.getLogger(__name__)

LEASE_S = 2
"""An active router that is silent for so long is replaced. etcd allows no less."""
PIECE_BYTES = 256 * 1024
_PIECES_A_TXN = 4  # etcd refuses transactions of more than 1.5 MiB
_CALL_S = 5.0
_LOAD_S = 60.0
"""A call that reads a whole journal."""
_LOOK_S = 0.1
_DIGITS_MAX = 15
_CHANNEL = {
    "grpc.max_receive_message_length": -1,
    "grpc.max_send_message_length": -1,
    "grpc.enable_http_proxy": 0,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,  # a member that is back after an hour is found again at once
}
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """What etcd asks of a client. Default: plain text, and no user."""

    tls: bool = False
    ca: bytes | None = None
    """Certificates, in PEM, one of which has signed that of each member. None: those that the system trusts."""
    certificate: bytes | None = None
    """The certificate of this client, in PEM. None: etcd asks for none."""
    key: bytes | None = field(default=None, repr=False)
    user: str = ""
    """Empty: etcd has no users."""
    password: str = field(default="", repr=False)


class EtcdMedium:
    """A :class:`memserve.journal.store.Medium` in etcd. It must be elected before it is used."""

    def __init__(self, hosts: Sequence[str], name: str = "default", access: EtcdAccess | None = None) -> None:
        """``hosts``: ``host:port`` of etcd's members. Raises :class:`UserError` when none answers, or the package that
        speaks to them is missing."""
        try:
            import aetcd
        except ImportError as error:
            hint = "pip install 'memserve[etcd]'"
            raise UserError(f"etcd needs the package aetcd: {error}", hint=hint, param="metadata") from None
        _check_hosts(hosts)
        self._root = f"/memserve/{name}/"
        self._access = access or EtcdAccess()
        self._rpc, self._t = aetcd.rpc, aetcd.client.Transactions()
        self._transient_errors = aetcd.exceptions.ConnectionFailedError | aetcd.exceptions.ConnectionTimeoutError
        self._number = self._tried = self._pieces = 0
        self._pending: list[bytes] = []
        self._lease_id: int | None = None
        self._created = 0  # the revision at which this router's key was created
        self._refresher: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="memserve-etcd", daemon=True)
        self._thread.start()
        #: one a member, the one that answered last first
        self._clients: deque[Any] = deque()
        try:
            self._wait_for(self._open_clients(aetcd, hosts), _CALL_S)
            self._call_and_wait(lambda client: client.get(self._key_of("router")))
        except MediumFailed as error:
            self._stop_loop()
            hint = "start one, or give its address: --metadata etcd://HOST:2379; TLS and users: --metadata-credentials"
            raise UserError(f"no etcd answers at {', '.join(hosts)}: {error}", hint=hint, param="metadata") from None

    # -- the election

    def await_election(self, own_name: str, on_waiting: Callable[[str], None], on_lost: Callable[[], None]) -> None:
        """Wait until this is the active router, also while etcd has no quorum.

        ``on_waiting`` is called with the name of the active one whenever that changes; ``on_lost``, from another
        thread, when another router is active: the lease could not be kept in time. Raises :class:`MediumFailed` when
        etcd cannot be asked even once.
        """
        reported_name, is_away = "", None  # None: etcd has not answered yet
        while True:
            try:
                active = self._wait_for(self._claim_router_key(own_name), _CALL_S)
            except MediumFailed as error:
                if is_away is None:
                    raise
                if not is_away:
                    log.warning("%s: this router stands by until etcd answers", error)
                is_away = True
                continue
            is_away = False
            if active is None:
                break
            if active not in ("", reported_name):
                on_waiting(active)
                reported_name = active
            time.sleep(_LOOK_S)
        self._refresher = asyncio.run_coroutine_threadsafe(self._keep_lease(own_name, on_lost), self._loop)

    async def _claim_router_key(self, own_name: str, try_s: float = _CALL_S) -> str | None:
        """Create the key, if there is none. None: it is this router's. Empty: the one that
        was there has just ended. Else: the name of the active one."""
        if self._lease_id is None or not await self._refresh_lease(try_s):
            self._lease_id = (await self._call_any_member(lambda client: client.lease(LEASE_S), try_s)).id
        key, t, lease_id = self._key_of("router"), self._t, self._lease_id
        put = t.put(key, json.dumps({"router": own_name}).encode(), lease_id)
        await self._call_any_member(lambda client: client.transaction([t.version(key) == 0], [put], []), try_s)
        entry = await self._call_any_member(lambda client: client.get(key), try_s)
        if entry is None:
            return ""
        if entry.lease == lease_id:  # also where it was created by a call whose answer was lost
            self._created = entry.create_revision
            return None
        try:
            return str(json.loads(entry.value)["router"])
        except (ValueError, TypeError, KeyError):
            return "a router that does not say its name"

    async def _refresh_lease(self, try_s: float) -> bool:
        """Keep the lease; False: it has ended."""
        return bool((await self._call_any_member(lambda client: client.refresh_lease(self._lease_id), try_s)).TTL)

    async def _keep_lease(self, own_name: str, on_lost: Callable[[], None]) -> None:
        """Until another router is active. While etcd is away none can be elected, so this one goes on."""
        is_away, try_s = False, LEASE_S / 3
        while True:
            await asyncio.sleep(LEASE_S / 6)
            try:
                is_kept = await self._refresh_lease(try_s) or await self._claim_router_key(own_name, try_s) is None
            except Exception as error:
                if not is_away:
                    why = error or type(error).__name__
                    log.warning("etcd does not answer (%s): this router goes on, and can be replaced", why)
                is_away = True
                continue
            is_away = False
            if not is_kept:
                on_lost()
                return

    # -- the medium

    @property
    def name(self) -> str:
        """As :class:`Medium`."""
        return f"etcd {self._root}journal"

    def load(self) -> bytes | None:
        """As :class:`Medium`. Raises :class:`UserError` when it cannot be known which journal is the current one."""
        current = self._call_and_wait(lambda client: client.get(self._key_of("current")))
        if current is None:
            self._check_new()
            return None
        if not (current.value.isdigit() and len(current.value) <= _DIGITS_MAX):
            shown = current.value[:40]
            raise UserError(f"{self._root}current is {shown!r}, and no number", hint="restore it", param="metadata")
        self._number = int(current.value)
        journal = self._journal_prefix(self._number)
        pieces = list(self._call_and_wait(lambda client: client.get_prefix(journal, sort_order="ascend"), _LOAD_S))
        self._pieces = len(pieces)
        return b"".join(piece.value for piece in pieces)

    def _check_new(self) -> None:
        """Without ``current`` there may be parts of a first journal: its router died while it wrote them."""
        pieces = self._call_and_wait(lambda client: client.get_prefix(self._key_of("journal/"), keys_only=True))
        if any(not piece.key.startswith(self._journal_prefix(1)) for piece in pieces):
            message = f"the metadata is lost: there are journals, and no {self._root}current that names one"
            raise UserError(message, hint="restore it", param="metadata")

    def append(self, data: bytes) -> None:
        """As :class:`Medium`: kept here until ``sync``."""
        self._pending.append(data)

    def sync(self) -> None:
        """As :class:`Medium`."""
        data, self._pending = b"".join(self._pending), []
        self._put_pieces(self._number, self._pieces, data)
        self._pieces += -(-len(data) // PIECE_BYTES)

    def replace(self, data: bytes) -> None:
        """As :class:`Medium`: the new journal is there before its number is.

        Each attempt has a number of its own: an earlier one whose answer was lost may be the current journal by now,
        or become it, as long as no other has.
        """
        t, current = self._t, self._key_of("current")
        previous = self._call_and_wait(lambda client: client.get(current))
        new = self._tried = 1 if previous is None else max(self._number, self._tried) + 1
        self._guarded(
            [t.delete(self._journal_prefix(new), self._journal_prefix(new)[:-1] + b"0")]
        )  # of another router's attempt
        self._put_pieces(new, 0, data)
        revision = 0 if previous is None else previous.mod_revision
        self._guarded([t.put(current, str(new).encode())], t.mod(current) == revision)
        self._number, self._pieces, self._pending = new, -(-len(data) // PIECE_BYTES), []
        self._guarded([t.delete(self._journal_prefix(0), self._journal_prefix(new))])

    def close(self) -> None:
        """End the lease, so that another router is active at once."""
        if self._refresher is not None:
            self._refresher.cancel()
        try:
            if self._lease_id is not None:
                self._call_and_wait(lambda client: client.revoke_lease(self._lease_id))
        except MediumFailed as error:
            log.info("etcd: %s", error)
        self._stop_loop()

    # -- inside

    def _put_pieces(self, number: int, first: int, data: bytes) -> None:
        t, prefix = self._t, self._journal_prefix(number)
        pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
        for start in range(0, len(pieces), _PIECES_A_TXN):
            batch = enumerate(pieces[start : start + _PIECES_A_TXN], first + start)
            self._guarded([t.put(prefix + b"%016x" % place, piece) for place, piece in batch])

    def _guarded(self, operations: list[Any], *conditions: Any) -> None:
        """Only as long as this is the active router."""
        is_active = self._t.create(self._key_of("router")) == self._created
        is_committed, _ = self._call_and_wait(
            lambda client: client.transaction([is_active, *conditions], operations, [])
        )
        if not is_committed:
            raise MediumFailed("another router is active")

    def _call_and_wait(self, call: Callable[[Any], Awaitable[Answer]], within_s: float | None = None) -> Answer:
        """Wait for what ``call(client)`` gives, by default for ``_CALL_S``. Raises :class:`MediumFailed`, whatever goes
        wrong with it."""
        within_s = _CALL_S if within_s is None else within_s
        return self._wait_for(self._call_any_member(call, within_s), within_s)

    def _wait_for(self, answer: Coroutine[Any, Any, Answer], within_s: float) -> Answer:
        future = asyncio.run_coroutine_threadsafe(answer, self._loop)
        try:
            return future.result(within_s + 0.5)  # the calls end by themselves, and say why
        except Exception as error:
            future.cancel()
            raise MediumFailed(f"etcd: {error or type(error).__name__}") from error

    async def _call_any_member(self, call: Callable[[Any], Awaitable[Answer]], within_s: float) -> Answer:
        """What ``call(client)`` gives at the first member that answers, beginning with the one that answered last.

        Members that cannot be reached, or have no leader, are asked again and again: an election takes a second or two.
        A call that is repeated may have been done before; each is such that this changes nothing.
        """
        end_s = self._loop.time() + within_s
        while True:
            failures: list[Exception] = []
            for client in list(self._clients):
                try:
                    async with asyncio.timeout(min(within_s / len(self._clients), end_s - self._loop.time())):
                        return await self._call_member(client, call)
                except Exception as error:
                    failures.append(error)
                if client is self._clients[0]:
                    self._clients.rotate(-1)
            if not all(map(self._is_transient, failures)) or self._loop.time() + _LOOK_S >= end_s:
                raise next((error for error in failures if not isinstance(error, TimeoutError)), failures[-1])
            await asyncio.sleep(_LOOK_S)

    def _is_transient(self, error: Exception) -> bool:
        """Whether the next try may find a member that answers."""
        if isinstance(error, self._rpc.AioRpcError):
            return bool(error.code() in (self._rpc.StatusCode.UNAVAILABLE, self._rpc.StatusCode.DEADLINE_EXCEEDED))
        return isinstance(error, TimeoutError | self._transient_errors)

    async def _call_member(self, client: Any, call: Callable[[Any], Awaitable[Answer]]) -> Answer:
        """A member forgets the token of a user when it starts anew, or has not seen that for some minutes."""
        if not self._access.user:
            return await call(client)
        if client.metadata is not None:
            try:
                return await call(client)
            except Exception as error:
                if "token" not in str(error) and "auth" not in str(error):
                    raise
        login = self._rpc.AuthenticateRequest(name=self._access.user, password=self._access.password)
        client.metadata = (("token", (await client.auth_stub.Authenticate(login)).token),)
        return await call(client)

    async def _open_clients(self, aetcd: Any, hosts: Sequence[str]) -> None:
        """A client for each member, without saying anything yet. ``aetcd`` knows no TLS, so its client gets its
        channel and what it would make of it from here."""
        rpc = aetcd.rpc
        for host in hosts:
            client = aetcd.Client()
            client.channel = _channel(rpc, host, self._access)
            client.auth_stub, client.kvstub = rpc.AuthStub(client.channel), rpc.KVStub(client.channel)
            client.leasestub = rpc.LeaseStub(client.channel)
            client._connected.set()
            self._clients.append(client)

    async def _close_channels(self) -> None:
        for client in self._clients:
            await client.channel.close()

    def _key_of(self, name: str) -> bytes:
        return (self._root + name).encode()

    def _journal_prefix(self, number: int) -> bytes:
        return self._key_of(f"journal/{number:016x}/")

    def _stop_loop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close_channels(), self._loop).result(_CALL_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_S)


def _channel(rpc: Any, host: str, access: EtcdAccess) -> Any:
    if not access.tls:
        return rpc.insecure_channel(host, options=_CHANNEL.items())
    import grpc

    trust = grpc.ssl_channel_credentials(access.ca, access.key, access.certificate)
    return rpc.secure_channel(host, trust, options=_CHANNEL.items())


def _check_hosts(hosts: Sequence[str]) -> None:
    """Raises :class:`UserError` where one is no ``HOST:PORT``, and where none has an address."""
    resolved_hosts, problem = 0, None
    for host in hosts:
        name, _, port = host.rpartition(":")
        if not name or not port.isdigit():
            raise UserError(f"etcd wants HOST:PORT, got {host!r}", hint="etcd://10.0.0.1:2379", param="metadata")
        try:
            socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_STREAM)
            resolved_hosts += 1
        except OSError as error:
            problem = error
    if problem is not None and not resolved_hosts:
        message = f"there is no way to {', '.join(hosts)}: {problem.strerror or problem}"
        raise UserError(message, hint="check --metadata", param="metadata")
