"""A journal in etcd, and the election of the one router that may write it (level 3, row C10).

::

    /memserve/NAME/router                  who is active; lives as long as its lease
    /memserve/NAME/current                 number of the journal
    /memserve/NAME/journal/NUMBER/PIECE    its bytes, in order, at most PIECE_BYTES each

The journal is the one that lies in a file otherwise, so everything that is tested of it holds here. Every write is a
transaction that compares the key ``router`` with the one that this process has created: a router that was paused, and
whose place another has taken meanwhile, cannot write any more, whatever it believes.

The key's lease ends ``LEASE_S`` after the last sign of life. Routers that wait watch the key, and the first to create
it anew is active.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from memserve.errors import UserError
from memserve.meta.medium import MediumFailed

log = logging.getLogger(__name__)

LEASE_S = 2
"""An active router that is silent for so long is replaced. etcd allows no less."""
PIECE_BYTES = 256 * 1024
_PIECES_A_TXN = 4  # etcd refuses transactions of more than 1.5 MiB
_CALL_S = 5.0
_WATCH_S = 1.0
_DIGITS_MAX = 15
Answer = TypeVar("Answer")


class EtcdMedium:
    """A :class:`memserve.meta.medium.Medium` in etcd. It must be elected before it is used."""

    def __init__(self, hosts: Sequence[str], name: str = "default") -> None:
        """``hosts``: ``host:port`` of etcd's members. Raises :class:`UserError` when none answers, or the package that
        speaks to them is missing."""
        try:
            import aetcd
        except ImportError as error:
            hint = "pip install 'memserve[etcd]'"
            raise UserError(f"etcd needs the package aetcd: {error}", hint=hint, param="metadata") from None
        self._root = f"/memserve/{name}/"
        self._number = self._pieces = 0
        self._pending: list[bytes] = []
        self._lease: Any = None
        self._created = 0  # the revision at which our key was created
        self._refresher: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="memserve-etcd", daemon=True)
        self._thread.start()
        options = {"grpc.max_receive_message_length": -1, "grpc.max_send_message_length": -1}
        self._client = self._do(_open(aetcd, _target(hosts), options))
        try:
            self._do(self._client.get(self._key("router")))
        except MediumFailed as error:
            self._stop()
            hint = "start one, or give its address: --metadata etcd://HOST:2379"
            raise UserError(f"no etcd answers at {', '.join(hosts)}: {error}", hint=hint, param="metadata") from None

    # -- the election

    def elect(self, me: str, on_waiting: Callable[[str], None], on_lost: Callable[[], None]) -> None:
        """Wait until this is the active router.

        ``on_waiting`` is called with the name of the one that is, whenever that changes; ``on_lost``, from another
        thread, when another one is active: the lease could not be kept in time. Raises :class:`MediumFailed` when
        etcd has not answered for some seconds.
        """
        told = ""
        while not self._do(self._campaign(me)):
            active = self._do(self._active())
            if active != told:
                on_waiting(active)
                told = active
            self._do(self._wait_for_change())
        self._refresher = asyncio.run_coroutine_threadsafe(self._keep_lease(me, on_lost), self._loop)

    async def _campaign(self, me: str) -> bool:
        """Create the key, if there is none."""
        if self._lease is None or not (await self._lease.refresh()).TTL:
            self._lease = await self._client.lease(LEASE_S)
        key, t = self._key("router"), self._client.transactions
        value = json.dumps({"router": me}).encode()
        won, _ = await self._client.transaction([t.version(key) == 0], [t.put(key, value, self._lease.id)], [])
        if won:
            self._created = (await self._client.get(key)).create_revision
        return bool(won)

    async def _active(self) -> str:
        found = await self._client.get(self._key("router"))
        try:
            return str(json.loads(found.value)["router"]) if found is not None else "no router"
        except (ValueError, TypeError, KeyError):
            return "a router that does not say its name"

    async def _wait_for_change(self) -> None:
        """Until the key changes, or it is time to look (and to keep the lease of a candidate alive)."""
        watch = await self._client.watch(self._key("router"))
        try:
            async with asyncio.timeout(_WATCH_S):
                async for _ in watch:
                    return
        except TimeoutError:
            return
        finally:
            await watch.cancel()

    async def _keep_lease(self, me: str, on_lost: Callable[[], None]) -> None:
        """Until another router is active. While etcd is away nobody can be elected, so this one goes on."""
        is_away = False
        while True:
            await asyncio.sleep(LEASE_S / 6)
            try:
                async with asyncio.timeout(LEASE_S / 3):
                    is_kept = (await self._lease.refresh()).TTL or await self._campaign(me)
            except Exception as error:
                if not is_away:
                    log.warning("etcd does not answer (%s): this router goes on, and can be replaced", error)
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
        current = self._do(self._client.get(self._key("current")))
        if current is None:
            self._check_new()
            return None
        if not (current.value.isdigit() and len(current.value) <= _DIGITS_MAX):
            shown = current.value[:40]
            raise UserError(f"{self._root}current is {shown!r}, and no number", hint="restore it", param="metadata")
        self._number = int(current.value)
        pieces = list(self._do(self._client.get_prefix(self._journal(self._number), sort_order="ascend")))
        self._pieces = len(pieces)
        return b"".join(piece.value for piece in pieces)

    def _check_new(self) -> None:
        """Without ``current`` there may be parts of a first journal, whose router died while it wrote them."""
        pieces = self._do(self._client.get_prefix(self._key("journal/"), keys_only=True))
        if any(not piece.key.startswith(self._journal(1)) for piece in pieces):
            message = f"the metadata is lost: there are journals, and no {self._root}current that names one"
            raise UserError(message, hint="restore it", param="metadata")

    def append(self, data: bytes) -> None:
        """As :class:`Medium`: kept here until ``sync``."""
        self._pending.append(data)

    def sync(self) -> None:
        """As :class:`Medium`."""
        data, self._pending = b"".join(self._pending), []
        self._put(self._number, self._pieces, data)
        self._pieces += -(-len(data) // PIECE_BYTES)

    def replace(self, data: bytes) -> None:
        """As :class:`Medium`: the new journal is there before its number is."""
        t, old, new = self._client.transactions, self._number, self._number + 1
        self._guarded([t.delete(self._journal(new), self._journal(new)[:-1] + b"0")])  # what a failed attempt has left
        self._put(new, 0, data)
        self._guarded([t.put(self._key("current"), str(new).encode())])
        self._number, self._pieces, self._pending = new, -(-len(data) // PIECE_BYTES), []
        self._guarded([t.delete(self._journal(old), self._journal(old)[:-1] + b"0")])

    def close(self) -> None:
        """Give the place up at once."""
        if self._refresher is not None:
            self._refresher.cancel()
        try:
            if self._lease is not None:
                self._do(self._lease.revoke())
            self._do(self._client.close())
        except MediumFailed as error:
            log.info("etcd: %s", error)
        self._stop()

    # -- inside

    def _put(self, number: int, first: int, data: bytes) -> None:
        t, prefix = self._client.transactions, self._journal(number)
        pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
        for at in range(0, len(pieces), _PIECES_A_TXN):
            some = enumerate(pieces[at : at + _PIECES_A_TXN], first + at)
            self._guarded([t.put(prefix + b"%016x" % place, piece) for place, piece in some])

    def _guarded(self, operations: list[Any]) -> None:
        """Only as long as we are the active router."""
        t, key = self._client.transactions, self._key("router")
        done, _ = self._do(self._client.transaction([t.create(key) == self._created], operations, []))
        if not done:
            raise MediumFailed("another router is active")

    def _do(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        """Wait for ``call``. Raises :class:`MediumFailed`, whatever goes wrong with it."""
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(_CALL_S)
        except Exception as error:
            future.cancel()
            raise MediumFailed(f"etcd: {error or type(error).__name__}") from error

    def _key(self, name: str) -> bytes:
        return (self._root + name).encode()

    def _journal(self, number: int) -> bytes:
        return self._key(f"journal/{number:016x}/")

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_S)


async def _open(aetcd: Any, target: tuple[str, int], options: dict[str, int]) -> Any:
    return aetcd.Client(*target, timeout=_CALL_S, options=options)


def _target(hosts: Sequence[str]) -> tuple[str, int]:
    """All members, as gRPC writes a list of addresses: it goes to the next when one is gone."""
    found: list[str] = []
    for host in hosts:
        name, _, port = host.rpartition(":")
        if not name or not port.isdigit():
            raise UserError(f"etcd wants HOST:PORT, got {host!r}", hint="etcd://10.0.0.1:2379", param="metadata")
        try:
            infos = socket.getaddrinfo(name.strip("[]"), int(port), socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            message = f"there is no way to {host}: {error.strerror or error}"
            raise UserError(message, hint="check --metadata", param="metadata") from None
        found += [f"{info[4][0]!s}:{int(info[4][1])}" for info in infos]
    first, _, last_port = ",".join(found).rpartition(":")
    return f"ipv4:{first}", int(last_port)
