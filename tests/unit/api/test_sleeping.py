"""A model that sleeps and wakes: when, and what requests wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from memserve.api.sleeping import ModelSleep
from memserve.base.errors import UserError

PATIENCE_S = 20.0


class Instances:
    """What is started and ended; ``gate`` holds a change back."""

    def __init__(self) -> None:
        self.calls: list[bool] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failure: UserError | None = None

    def perform(self, is_awake: bool) -> None:
        self.calls.append(is_awake)
        assert self.gate.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure


def run(story: Callable[[Instances], Awaitable[None]]) -> Instances:
    instances = Instances()
    asyncio.run(asyncio.wait_for(story(instances), PATIENCE_S))
    return instances


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_request_wakes_it_and_is_told_how_long_that_took() -> None:
    async def story(instances: Instances) -> None:
        sleep = ModelSleep("m", None, instances.perform)
        async with sleep.in_use() as waited_s:
            assert waited_s == 0.0 and not await sleep.fall_asleep(), "a request is open"
        assert await sleep.fall_asleep() and sleep.is_asleep
        async with sleep.in_use() as waited_s:
            assert waited_s > 0.0 and not sleep.is_asleep
        assert sleep.wakes == 1 and sleep.wake_s > 0.0 and sleep.requests_open == 0

    assert run(story).calls == [False, True]


def test_requests_that_come_together_wake_it_once() -> None:
    async def story(instances: Instances) -> None:
        sleep = ModelSleep("m", None, instances.perform)
        await sleep.fall_asleep()
        instances.gate.clear()

        async def ask() -> float:
            async with sleep.in_use() as waited_s:
                return waited_s

        asked = [asyncio.create_task(ask()) for _ in range(5)]
        await until(lambda: sleep.requests_open == 5)
        asked.pop().cancel()  # its client leaves, and the others still wait for the same start
        instances.gate.set()
        assert all(waited_s > 0 for waited_s in await asyncio.gather(*asked))
        assert sleep.requests_open == 0

    assert run(story).calls == [False, True]


def test_a_request_that_comes_as_it_falls_asleep_wakes_it() -> None:
    async def story(instances: Instances) -> None:
        sleep = ModelSleep("m", None, instances.perform)
        instances.gate.clear()
        falling = asyncio.create_task(sleep.fall_asleep())
        await until(lambda: instances.calls == [False])

        async def ask() -> bool:
            async with sleep.in_use():
                return sleep.is_asleep

        asked = asyncio.create_task(ask())
        await until(lambda: sleep.requests_open == 1)
        instances.gate.set()
        assert await falling and not await asked

    assert run(story).calls == [False, True]


def test_it_sleeps_after_a_time_without_requests() -> None:
    async def story(instances: Instances) -> None:
        sleep = ModelSleep("m", 0.05, instances.perform, look_s=0.005)
        watch = asyncio.create_task(sleep.watch())
        async with sleep.in_use():
            await asyncio.sleep(0.2)
            assert instances.calls == [], "a request is open"
        await until(lambda: sleep.is_asleep)
        async with sleep.in_use():
            assert not sleep.is_asleep
        await until(lambda: instances.calls == [False, True, False])
        watch.cancel()

    assert run(story).calls == [False, True, False]


def test_without_a_time_it_does_not_sleep_by_itself() -> None:
    async def story(instances: Instances) -> None:
        await ModelSleep("m", None, instances.perform, look_s=0.001).watch()

    assert run(story).calls == []


def test_instances_that_do_not_start_are_asked_for_again() -> None:
    async def story(instances: Instances) -> None:
        sleep = ModelSleep("m", None, instances.perform)
        await sleep.fall_asleep()
        instances.failure = UserError("no memory")
        with pytest.raises(UserError, match="no memory"):
            async with sleep.in_use():
                raise AssertionError("it is not awake")
        assert sleep.is_asleep and sleep.requests_open == 0
        instances.failure = None
        async with sleep.in_use():
            assert not sleep.is_asleep

    assert run(story).calls == [False, True, True]
