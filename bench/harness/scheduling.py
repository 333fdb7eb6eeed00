"""A scheduler kept busy by a device that does nothing, and indexes of prefixes asked for prompts: the same requests and
prompts for memserve's and for another engine's, each of which runs in its own process and environment.

Nothing here imports an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.rounds import Timer, mean, median, percentile

Tokens = NDArray[np.int32]
VOCABULARY = 49_000
STOP_TOKENS = (0, 2)
DRAWN_TOKEN = 1234
"""What the device answers for each row that draws; no stop token."""
WARM_STEPS_MAX = 50_000
DECODE_ANSWER_TOKENS = 1900


@dataclass(frozen=True)
class Shape:
    """What a scheduler is kept at. ``decode``: every sequence decodes. ``mixed``: requests end and new ones take their
    place, half of whose prompt is common to all, so that a piece of a prompt is in nearly every step."""

    running: int
    load: str = "decode"
    prompt_tokens: int = 1024
    step_tokens: int = 2048
    """The budget of a step: a piece of a prompt gets what decodes leave of it."""
    chunk_tokens: int = 512
    """The most of one prompt in a step."""
    block_tokens: int = 32

    @property
    def is_mixed(self) -> bool:
        return self.load == "mixed"

    @property
    def shared_tokens(self) -> int:
        """Of each prompt, common to all of them."""
        return self.prompt_tokens // 2 if self.is_mixed else 0

    @property
    def blocks(self) -> int:
        """KV memory in which all that runs, and the common part, has room."""
        answer_tokens = 320 if self.is_mixed else DECODE_ANSWER_TOKENS
        return self.running * ((self.prompt_tokens + answer_tokens) // self.block_tokens + 6) + 256


@dataclass(frozen=True)
class MadeRequest:
    """One request for a scheduler."""

    number: int
    prompt: Tokens
    answer_tokens: int

    @property
    def name(self) -> str:
        return f"request-{self.number}"


class StepDriver(ABC):
    """Keeps a scheduler at a shape, and times its steps. An engine's driver adds requests and answers plans."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.arrivals = self.ended = 0
        self._random = np.random.default_rng(7)
        self._shared = self._random.integers(0, VOCABULARY, shape.shared_tokens, dtype=np.int32)

    @abstractmethod
    def add_request(self, request: MadeRequest, timer: Timer) -> None:
        """Give the scheduler a request; the timer gets what that takes."""

    @abstractmethod
    def finish_step(self, timer: Timer) -> tuple[int, int]:
        """The device answers the oldest plan, and the next one is made; the timer gets the time of both. Returns rows
        and tokens of the answered plan."""

    def fill(self, timer: Timer) -> None:
        """Requests arrive until as many are there as shall run."""
        while self.arrivals - self.ended < self.shape.running:
            self.add_request(self._next_request(), timer)
            self.arrivals += 1

    def warm_up(self) -> None:
        """Run until every sequence decodes, or until requests have come and gone for a while."""
        running, timer = self.shape.running, Timer()
        self.fill(timer)
        for step in range(WARM_STEPS_MAX):
            rows, tokens = self.finish_step(timer)
            self.fill(timer)
            is_warm = self.ended >= 2 * running if self.shape.is_mixed else rows == tokens == running
            if is_warm and step >= running:
                return
        raise AssertionError(f"{self.shape} has no steady state")

    def measure_steps(self, steps: int) -> dict[str, Any]:
        """Microseconds a step, by the clock and of this thread's CPU time: ``us`` has arrivals in it, ``step_us`` and
        ``us_median`` have not."""
        step, arrival = Timer(), Timer()
        arrivals = self.arrivals
        plans = []
        for _ in range(steps):
            plans.append(self.finish_step(step))
            self.fill(arrival)
        return {
            "rows": round(mean(rows for rows, _ in plans), 1),
            "tokens": round(mean(tokens for _, tokens in plans), 1),
            "arrivals": round((self.arrivals - arrivals) / steps, 3),
            "us": round((sum(step.us) + sum(arrival.us)) / steps, 2),
            "cpu_us": round((sum(step.cpu_us) + sum(arrival.cpu_us)) / steps, 2),
            "step_us": round(mean(step.us), 2),
            "step_cpu_us": round(mean(step.cpu_us), 2),
            "us_median": round(median(step.us), 2),
            "us_p99": round(percentile(step.us, 0.99), 2),
        }

    def _next_request(self) -> MadeRequest:
        shape = self.shape
        rest = self._random.integers(0, VOCABULARY, shape.prompt_tokens - shape.shared_tokens, dtype=np.int32)
        # spread lengths, so that endings are spread
        answer_tokens = 64 + self.arrivals % 256 if shape.is_mixed else DECODE_ANSWER_TOKENS
        return MadeRequest(self.arrivals, np.concatenate((self._shared, rest)), answer_tokens)


class IndexDriver(ABC):
    """Asks an index for prompts that it holds and for fresh ones. An engine's driver plants and looks up."""

    def __init__(self, lengths: list[int], prompts: int) -> None:
        """Plant ``prompts`` prompts of each length: a quarter of each is common to those of its length."""
        self.prompts = prompts
        for length in lengths:
            for number in range(prompts):
                self.plant_tokens(prompt_of(length, number))

    @abstractmethod
    def plant_tokens(self, tokens: Tokens) -> None:
        """Make all whole blocks of ``tokens`` cached."""

    @abstractmethod
    def look_up(self, tokens: Tokens, timers: Callable[[str], Timer]) -> int:
        """Find the cached prefix; each part of the work goes by the timer of its name. Returns its tokens."""

    def measure_lookups(self, length: int, *, is_cached: bool, turn: int, by_clock: bool) -> dict[str, float]:
        """Median microseconds of each part, over as many prompts of ``length`` tokens and one, whose last is never
        cached, so that engines which compute the last token of a prompt in any case find as much as others."""
        timers: dict[str, Timer] = {}
        for number in range(self.prompts):
            place = number if is_cached else 1_000_000 * (turn + 1) + number
            tokens = np.append(prompt_of(length, place, is_fresh=not is_cached), np.int32(1))
            matched = self.look_up(tokens, lambda name: timers.setdefault(name, Timer()))
            if matched != (length if is_cached else 0):
                raise AssertionError(f"{matched} tokens of {length} are cached")
        return {name: round(median(timer.us if by_clock else timer.cpu_us), 3) for name, timer in timers.items()}


def prompt_of(length: int, number: int, *, is_fresh: bool = False) -> Tokens:
    """Prompt ``number`` of this length; its first quarter is that of all others, if it is not fresh."""
    rest = np.random.default_rng((0, 2, length, number)).integers(1, VOCABULARY, length, dtype=np.int32)
    if not is_fresh:
        rest[: length // 4] = np.random.default_rng((0, 1, length)).integers(1, VOCABULARY, length // 4)
    return rest
