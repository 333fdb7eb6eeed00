"""AsyncStoreClient: the calls of StoreClient as coroutines, side by side."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from memserve import StoreClient, StoreUnavailable, UserError, _core
from memserve.protocol.messages import AnyMessage
from memserve.protocol.store import StorePut
from memserve.store.client.async_client import AsyncStoreClient
from scripted_store import SECRET, ScriptedStore


@asynccontextmanager
async def client_of(store: ScriptedStore, folder: Path) -> AsyncIterator[AsyncStoreClient]:
    secret_file = folder / "secret"
    secret_file.write_text(SECRET)
    secret_file.chmod(0o600)
    async with AsyncStoreClient(store.address, secret_file=secret_file) as client:
        yield client


def with_client(
    folder: Path, story: Callable[[ScriptedStore, AsyncStoreClient], Coroutine[Any, Any, None]], tier: Any = None
) -> None:
    async def run() -> None:
        with ScriptedStore(tier) as store:
            async with client_of(store, folder) as client:
                await asyncio.wait_for(story(store, client), 60)

    asyncio.run(run())


@pytest.mark.parametrize("mapped", [False, True])
def test_every_call_does_what_its_twin_does(tmp_path: Path, mapped: bool) -> None:
    tier = _core.MemoryTier(1 << 20, 4096, name=f"test-async-{os.getpid()}") if mapped else None

    async def story(store: ScriptedStore, client: AsyncStoreClient) -> None:
        assert client.client.is_mapped is mapped
        assert await client.get(b"key") is None
        assert await client.put(b"key", b"value")
        assert await client.put_many([(b"a", b"1"), (b"b", bytes(50_000))]) == [True, True]
        view = await client.get(b"key")
        assert view is not None and bytes(view) == b"value" and view.in_place is mapped
        view.release()
        buffer = bytearray(5)
        assert await client.get_into([(b"key", buffer)]) == [5] and buffer == b"value"
        assert await client.exists([b"a", b"none"]) == [True, False]
        assert await client.match_last_index([b"a", b"b", b"none"]) == 1
        memory = await client.allocate(3)
        memory.data[:] = b"abc"
        assert await client.put(b"c", memory)
        memory.release()
        assert (await client.statistics())["values"] == 4
        assert await client.delete([b"a"]) == 1
        assert await client.purge() == 3

    with_client(tmp_path, story, tier)
    if tier is not None:
        tier.unlink()


def test_calls_wait_side_by_side(tmp_path: Path) -> None:
    """A put that waits for its answer keeps no other call back, nor the event loop."""

    async def story(store: ScriptedStore, client: AsyncStoreClient) -> None:
        asked, answered = threading.Event(), threading.Event()
        answer, held = store._mailbox.send, []

        def hold_puts(to: Any, message: AnyMessage) -> None:
            if held or asked.is_set():
                answer(to, message)
            else:
                held.append((to, message))
                asked.set()

        store._mailbox.send = hold_puts
        slow = asyncio.create_task(client.put(b"slow", b"value", timeout_s=60))
        await asyncio.to_thread(asked.wait, 30)
        assert await client.put(b"fast", b"value") and not slow.done()
        answer(*held[0])
        answered.set()
        assert await slow
        assert sum(isinstance(message, StorePut) for message in store.heard) == 2

    with_client(tmp_path, story)


def test_errors_come_through(tmp_path: Path) -> None:
    async def story(store: ScriptedStore, client: AsyncStoreClient) -> None:
        with pytest.raises(UserError, match="a key is"):
            await client.put("text", b"value")
        with pytest.raises(UserError, match="a key is"):
            await client.get("text")
        store.is_silent = True
        with pytest.raises(StoreUnavailable, match="in time"):
            await client.put(b"key", b"value", timeout_s=0.05)
        await client.close()
        with pytest.raises(UserError, match="closed"):
            await client.get(b"key")

    with_client(tmp_path, story)
    with pytest.raises(UserError, match="not been started"):
        _ = AsyncStoreClient("127.0.0.1:7000").client


def test_both_clients_have_the_same_parameters() -> None:
    for name, method in inspect.getmembers(AsyncStoreClient, inspect.iscoroutinefunction):
        if name not in ("start", "_look_up_keys", "_in_thread", "__aenter__", "__aexit__"):
            twin = inspect.signature(getattr(StoreClient, name))
            assert inspect.signature(method).parameters == twin.parameters, name
    assert inspect.signature(AsyncStoreClient) == inspect.signature(StoreClient)
