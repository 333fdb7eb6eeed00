"""Many seeds, each with its verdict."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from multiprocessing import get_context

from memserve.base.errors import UserError, check
from memserve.base.types import Caching, TransferMode
from memserve_lab.sim.fuzz.plants import planted
from memserve_lab.sim.fuzz.scenario import ALL_MIXES, FREE, WEATHERS, Forced, Setting, draw
from memserve_lab.sim.fuzz.world import World
from memserve_lab.sim.reference.oracle import require

_STRIDE = 7919
"""A prime, so that the seeds go through the whole grid whatever its size."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one seed. Plain data, sent between processes."""

    seed: int
    setting: str
    requests: int
    steps: int
    """Number of events in virtual time."""
    spent_s: float
    happened: Counter[str] = field(default_factory=Counter)
    """Counts by name: faults that struck, and features that were exercised."""
    failure: str = ""
    """What is wrong; "" = nothing."""
    where: str = ""
    """The line of code that noticed the failure."""
    story: tuple[str, ...] = ()
    """The last events, if the seed failed or the story was asked for."""


@cache
def settings_grid(weather: str | None = None) -> tuple[Setting, ...]:
    """Every caching level, transfer mode and mix of roles, in every weather or in one."""
    weathers = WEATHERS if weather is None else (weather,)
    return tuple(_setting(c, t, mix, w) for c, t, mix, w in product(Caching, TransferMode, ALL_MIXES, weathers))


def _setting(caching: Caching, transfer: TransferMode, mix: str, weather: str) -> Setting:
    return Setting(caching, transfer, mix, faulty=weather != "healthy", swarm=weather == "swarm")


def setting_of(seed: int, weather: str | None = None) -> Setting:
    """The default setting of a seed: neighbouring seeds have little in common, and all settings occur."""
    grid = settings_grid(weather)
    return grid[seed * _STRIDE % len(grid)]


def parse_setting(text: str) -> Setting:
    """``pd-caching-3/by-layer/1P1D/faulty``, as :class:`Setting` writes itself. Raises :class:`UserError`."""
    for setting in settings_grid():
        if str(setting) == text:
            return setting
    raise UserError(
        f"{text!r} is not a setting",
        hint=f"e.g. pd-caching-3/by-layer/1P1D/faulty; mixes: {', '.join(ALL_MIXES)}; then {', '.join(WEATHERS)}",
    )


def play(seed: int, setting: Setting, story_lines: int = 400, *, forced: Forced = FREE) -> World:
    """Run one scenario to its end. Raises what is wrong, with the story as a note."""
    world = World(draw(seed, setting, forced), story_lines)
    try:
        world.run_scenario()
    except Exception as error:
        error.add_note("\n".join([*world.story, str(world.scenario)]))
        raise
    return world


def judge(
    seed: int,
    setting: Setting,
    story_lines: int = 4000,
    *,
    plant: str | None = None,
    forced: Forced = FREE,
    keep_story: bool = False,
    log: Callable[[str], object] | None = None,
) -> Verdict:
    """Run one scenario and return its verdict. ``plant`` is a safeguard to take out, ``log`` as in :class:`World`."""
    started = time.perf_counter()
    failure = place = ""
    with planted(plant):
        world = World(draw(seed, setting, forced), story_lines, log)
        try:
            world.run_scenario()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            place = _place_of(error)
    story = (*world.story, str(world.scenario)) if failure or keep_story else ()
    happened = world.happened + world.count_achievements()
    spent_s = time.perf_counter() - started
    requests, steps = len(world.referee.asks), world.clock.steps
    return Verdict(seed, str(setting), requests, steps, spent_s, happened, failure, place, story)


def _place_of(error: Exception) -> str:
    """The check that failed, not the function that raised."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.name not in (require.__name__, check.__name__)
    ]
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno} {frames[-1].name}"


def run_campaign(
    seeds: Sequence[int],
    *,
    weather: str | None = None,
    plant: str | None = None,
    forced: Forced = FREE,
    jobs: int = 1,
) -> Iterator[Verdict]:
    """One verdict per seed, in order, from ``jobs`` processes."""
    judge_one = partial(_judge_one, weather, plant, forced)
    if jobs == 1:
        yield from map(judge_one, seeds)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(judge_one, seeds, chunksize=4)


def _judge_one(weather: str | None, plant: str | None, forced: Forced, seed: int) -> Verdict:
    return judge(seed, setting_of(seed, weather), plant=plant, forced=forced)
