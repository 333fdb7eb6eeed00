"""One of several models, put to sleep while nothing is asked of it, and woken by the next request.

Asleep, its instances have ended: their memory is free, and what a store keeps of its KV stays there. Its tokenizer,
its documents and its names stay with the router.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from memserve.base.errors import UserError

log = logging.getLogger(__name__)

_LOOK_S = 1.0


class ModelSleep:
    """Lives in the event loop; instances start and end in other threads."""

    def __init__(
        self, model: str, after_s: float | None, perform: Callable[[bool], object], look_s: float = _LOOK_S
    ) -> None:
        """``after_s``: without a request; None: only when it is told to. ``perform(True)`` starts the instances and
        returns when they are ready, ``perform(False)`` ends them; both may raise :class:`UserError`."""
        self._model, self._after_s, self._perform, self._look_s = model, after_s, perform, look_s
        self._lock = asyncio.Lock()
        self._waking: asyncio.Task[None] | None = None
        self._used_s = time.monotonic()
        self.is_asleep = False
        self.requests_open = 0
        """That are being answered, or wait until it is awake."""
        self.wakes = 0
        self.wake_s = 0.0
        """How long it took to wake the last time."""

    @asynccontextmanager
    async def in_use(self) -> AsyncIterator[float]:
        """Inside, it is awake. Gives the seconds for which that was waited for. Raises :class:`UserError` where its
        instances do not start."""
        began = time.monotonic()
        self.requests_open += 1
        try:
            was_ready = not self.is_asleep and not self._lock.locked()
            if not was_ready:
                await self.wake_up()
            yield 0.0 if was_ready else time.monotonic() - began
        finally:
            self.requests_open -= 1
            self._used_s = time.monotonic()

    async def wake_up(self) -> None:
        """Returns when it is awake; a caller that leaves does not stop it. Raises :class:`UserError`."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._start_instances())
        await asyncio.shield(self._waking)

    async def fall_asleep(self) -> bool:
        """End its instances, unless requests are open; whether it is asleep now. Raises :class:`UserError`."""
        async with self._lock:
            if self.is_asleep or self.requests_open:
                return self.is_asleep
            self.is_asleep = True  # requests that come now wait for the lock
            idle_s = time.monotonic() - self._used_s
            await asyncio.to_thread(self._perform, False)
            log.warning("model %s sleeps: nothing was asked of it for %.0f s", self._model, idle_s)
            return True

    async def watch(self) -> None:
        """Look now and then whether it is time, until this is cancelled."""
        while self._after_s is not None:
            await asyncio.sleep(self._look_s)
            if self.is_asleep or self.requests_open or time.monotonic() - self._used_s < self._after_s:
                continue
            try:
                await self.fall_asleep()
            except UserError as error:
                log.warning("model %s is only half asleep: %s", self._model, error.message)

    async def _start_instances(self) -> None:
        async with self._lock:
            if not self.is_asleep:
                return
            began = time.monotonic()
            await asyncio.to_thread(self._perform, True)
            self.is_asleep, self.wakes, self.wake_s = False, self.wakes + 1, time.monotonic() - began
            self._used_s = time.monotonic()
            log.warning("model %s woke in %.1f s", self._model, self.wake_s)
