"""StoreClient for asyncio: what waits for the store waits in threads of the client's own.

What needs no word of the store is done at once: values in its memory on the same host, and whether keys are there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from memserve.base.errors import UserError
from memserve.base.units import MIB
from memserve.protocol.store import KvModel
from memserve.store.client.client import StoreClient
from memserve.store.client.memory import Staged, View
from memserve.store.client.single import TIMEOUT_S

if TYPE_CHECKING:
    from typing_extensions import Buffer

_THREADS = 16
"""Calls of one client that wait at a time; others wait for them."""
_AT_ONCE_KEYS = 4096
"""Keys that are looked up without leaving the event loop: a fraction of a millisecond."""

Result = TypeVar("Result")


class AsyncStoreClient:
    """As :class:`StoreClient`; every method that waits is a coroutine. Used from one event loop.

    >>> async with AsyncStoreClient("127.0.0.1:7100", secret_file="secret") as client:
    ...     await client.put(b"key", value)
    """

    def __init__(
        self,
        address: str,
        tenant: str = "default",
        secret_file: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        staging_bytes: int = 256 * MIB,
        listen: str | None = None,
        kv: KvModel | None = None,
        copies: int = 1,
    ) -> None:
        """As :class:`StoreClient`, which is made by :meth:`start`, or at the begin of ``async with``."""
        self._make = partial(
            StoreClient,
            address,
            tenant,
            secret_file,
            timeout_s=timeout_s,
            staging_bytes=staging_bytes,
            listen=listen,
            kv=kv,
            copies=copies,
        )
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="memserve-store-client")
        self._store_client: StoreClient | None = None

    async def start(self) -> None:
        """Find the store. Raises as :class:`StoreClient`."""
        if self._store_client is None:
            self._store_client = await self._in_thread(self._make)

    @property
    def client(self) -> StoreClient:
        """The client that does the work. Raises :class:`memserve.base.errors.UserError` before :meth:`start`, and as
        :meth:`StoreClient.check`."""
        if self._store_client is None:
            raise UserError("this client has not been started", hint="`async with client:`, or await client.start()")
        self._store_client.check()
        return self._store_client

    async def put(
        self, key: bytes, value: Buffer | Staged, *, overwrite: bool = True, timeout_s: float = TIMEOUT_S
    ) -> bool:
        """See :meth:`StoreClient.put`."""
        return await self._in_thread(self.client.put, key, value, overwrite=overwrite, timeout_s=timeout_s)

    async def put_many(
        self,
        pairs: Iterable[tuple[bytes, Buffer | Staged]],
        *,
        overwrite: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> list[bool]:
        """See :meth:`StoreClient.put_many`."""
        return await self._in_thread(self.client.put_many, list(pairs), overwrite=overwrite, timeout_s=timeout_s)

    async def allocate(self, nbytes: int, *, timeout_s: float = TIMEOUT_S) -> Staged:
        """See :meth:`StoreClient.allocate`."""
        return await self._in_thread(self.client.allocate, nbytes, timeout_s=timeout_s)

    async def get(self, key: bytes, *, timeout_s: float = TIMEOUT_S) -> View | None:
        """See :meth:`StoreClient.get`."""
        view = self.client.get_held(key)
        return view if view is not None else await self._in_thread(self.client.get, key, timeout_s=timeout_s)

    async def bring(self, keys: Iterable[bytes], *, timeout_s: float = TIMEOUT_S) -> list[int]:
        """See :meth:`StoreClient.bring`."""
        return await self._in_thread(self.client.bring, list(keys), timeout_s=timeout_s)

    async def get_into(
        self, pairs: Iterable[tuple[bytes, Buffer]], *, threads: int = 1, timeout_s: float = TIMEOUT_S
    ) -> list[int]:
        """See :meth:`StoreClient.get_into`."""
        return await self._in_thread(self.client.get_into, list(pairs), threads=threads, timeout_s=timeout_s)

    async def exists(self, keys: Iterable[bytes], *, timeout_s: float = TIMEOUT_S) -> list[bool]:
        """See :meth:`StoreClient.exists`."""
        return await self._look_up_keys(self.client.exists, list(keys), timeout_s)

    async def match_last_index(self, keys: Iterable[bytes], *, timeout_s: float = TIMEOUT_S) -> int:
        """See :meth:`StoreClient.match_last_index`."""
        return await self._look_up_keys(self.client.match_last_index, list(keys), timeout_s)

    async def delete(self, keys: Iterable[bytes], *, timeout_s: float = TIMEOUT_S) -> int:
        """See :meth:`StoreClient.delete`."""
        return await self._in_thread(self.client.delete, list(keys), timeout_s=timeout_s)

    async def purge(self, *, everything: bool = False, timeout_s: float = TIMEOUT_S) -> int:
        """See :meth:`StoreClient.purge`."""
        return await self._in_thread(self.client.purge, everything=everything, timeout_s=timeout_s)

    async def statistics(self, *, timeout_s: float = TIMEOUT_S) -> dict[str, int]:
        """See :meth:`StoreClient.statistics`."""
        return await self._in_thread(self.client.statistics, timeout_s=timeout_s)

    async def close(self) -> None:
        """See :meth:`StoreClient.close`."""
        if self._store_client is not None:
            await asyncio.to_thread(self._store_client.close)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> AsyncStoreClient:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _look_up_keys(self, look: Callable[..., Result], keys: list[bytes], timeout_s: float) -> Result:
        if len(keys) <= _AT_ONCE_KEYS and self.client.is_mapped:
            return look(keys, timeout_s=timeout_s)
        return await self._in_thread(look, keys, timeout_s=timeout_s)

    async def _in_thread(self, do: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(do, *args, **kwargs))
