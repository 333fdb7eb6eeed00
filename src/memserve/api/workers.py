"""Work on clients' text that would stall the event loop, done beside it by turns (level 4).

Parsing, chat templates and tokenizing take milliseconds to seconds for long texts. Three ways lead there: what is small
is done at once; what is short, and what is long, have one thread each, so that no short text waits for a long one. In
each line tenants take turns. How much may wait is bounded by the bodies that the server reads at a time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

INLINE_BYTES_MAX = 2048
"""Tokenizing this much (0.5 ms) costs less than a trip to a thread and back."""

SHORT_BYTES_MAX = 16 * 1024
"""Tokenizing this much takes less than ten milliseconds: less than a step of the engine."""


class Workers:
    """Two threads and their lines. Lives in the event loop."""

    def __init__(self) -> None:
        self._short, self._long = _Line("short"), _Line("long")

    async def run(self, tenant: str, text_bytes: int, work: Callable[[], Result]) -> Result:
        """The result of ``work`` on so much text of a tenant's client."""
        if text_bytes <= INLINE_BYTES_MAX:
            return work()
        line = self._short if text_bytes <= SHORT_BYTES_MAX else self._long
        return await line.run(tenant, work)

    def close(self) -> None:
        """Stop the threads."""
        self._short.close()
        self._long.close()


class _Line:
    """One thread, and those that wait for it."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"memserve-{name}-texts")
        self._taken = False
        #: by tenant; the first has the next turn
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        loop = asyncio.get_running_loop()
        if self._taken:
            await self._turn(tenant, loop)
        self._taken = True
        try:
            return await loop.run_in_executor(self._executor, work)
        finally:
            self._pass_on()

    async def _turn(self, tenant: str, loop: asyncio.AbstractEventLoop) -> None:
        turn = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came as it left
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """The next turn is another tenant's, where another one waits."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._taken = False

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
