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
        self._turns = _Turns()

    async def turn(self, tenant: str) -> None:
        """Wait until the event loop may begin with a request of a tenant: at once, unless many come in one moment."""
        await self._turns.wait(tenant)

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


class _Waiting:
    """Futures in lines by tenant, of which the next turn is another tenant's, where another one waits."""

    def __init__(self) -> None:
        #: the first tenant has the next turn
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}

    def add(self, tenant: str) -> asyncio.Future[None]:
        """At the end of the tenant's line."""
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(turn)
        return turn

    def pass_on(self) -> bool:
        """Give the next one its turn; False: nothing waits."""
        while self._lines:
            tenant = next(iter(self._lines))
            turns = self._lines.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._lines[tenant] = turns
            if not turn.done():  # else its client has left
                turn.set_result(None)
                return True
        return False


class _Turns:
    """Requests that come in one moment begin one in each round of the event loop, tenants in turn. So a burst of one
    tenant holds no other up: between two of its requests the loop reads what else has come."""

    def __init__(self) -> None:
        self._waiting = _Waiting()
        self._is_taken = False

    async def wait(self, tenant: str) -> None:
        if self._is_taken:
            await self._waiting.add(tenant)
        else:
            self._is_taken = True
            asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        self._is_taken = self._waiting.pass_on()
        if self._is_taken:
            asyncio.get_running_loop().call_soon(self._next_round)


class _Line:
    """One thread, and those that wait for it."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"memserve-{name}-texts")
        self._taken = False
        self._waiting = _Waiting()

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        loop = asyncio.get_running_loop()
        if self._taken:
            await self._turn(tenant)
        self._taken = True
        try:
            return await loop.run_in_executor(self._executor, work)
        finally:
            self._pass_on()

    async def _turn(self, tenant: str) -> None:
        turn = self._waiting.add(tenant)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came as it left
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        self._taken = self._waiting.pass_on()

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
