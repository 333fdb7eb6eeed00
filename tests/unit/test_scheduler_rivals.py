"""``bench/scheduler_rivals.py`` and ``index_rivals.py``: engines are asked the same, and memserve does it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.rounds import Timer
from harness.scheduling import IndexDriver, MadeRequest, Shape, StepDriver, Tokens, prompt_of
from index_rivals import RadixDriver
from scheduler_null import InstanceDriver

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


class RecordingDriver(StepDriver):
    """A scheduler that ends each request in the step after its arrival."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.requests: list[MadeRequest] = []

    def add_request(self, request: MadeRequest, timer: Timer) -> None:
        self.requests.append(request)

    def finish_step(self, timer: Timer) -> tuple[int, int]:
        timer(int)
        rows = self.arrivals - self.ended
        self.ended = self.arrivals
        return rows, 2 * rows


def test_engines_of_a_shape_get_the_same_requests() -> None:
    shape = Shape(4, "mixed", 64)
    first, second = RecordingDriver(shape), RecordingDriver(shape)
    for driver in (first, second):
        driver.warm_up()
        figures = driver.measure_steps(3)
        assert (figures["rows"], figures["tokens"], figures["arrivals"]) == (4, 8, 4)
    for request, equal in zip(first.requests, second.requests, strict=True):
        assert (request.name, request.answer_tokens) == (equal.name, equal.answer_tokens)
        assert request.prompt.tolist() == equal.prompt.tolist()
        assert request.prompt[:32].tolist() == first.requests[0].prompt[:32].tolist()
    assert len({tuple(request.prompt) for request in first.requests}) == len(first.requests)


def test_all_sequences_decode_in_steps_that_are_timed() -> None:
    driver = InstanceDriver(Shape(4, "decode", 96, step_tokens=64, chunk_tokens=64))
    driver.warm_up()
    figures = driver.measure_steps(20)
    assert (figures["rows"], figures["tokens"], figures["arrivals"]) == (4, 4, 0)
    assert figures["us"] == figures["step_us"] > 0 < figures["cpu_us"]


def test_mixed_steps_have_prompts_and_their_arrivals() -> None:
    driver = InstanceDriver(Shape(4, "mixed", 256, step_tokens=128, chunk_tokens=128))
    driver.warm_up()
    figures = driver.measure_steps(400)
    assert 0 < figures["arrivals"] < 1
    assert figures["rows"] < figures["tokens"] <= 128
    assert figures["us"] > figures["step_us"]


def test_index_finds_what_is_planted_and_nothing_else() -> None:
    driver = RadixDriver([64, 256], prompts=3, block_tokens=32)
    for length in (64, 256):
        for is_cached in (True, False):
            figures = driver.measure_lookups(length, is_cached=is_cached, turn=0, by_clock=True)
            assert set(figures) == {"identities_us", "acquire_us", "match_us"}
    driver._pool.check_invariants()
    assert driver._pool.match("", prompt_of(256, 0)) == 256
    assert driver._pool.match("", prompt_of(256, 0, is_fresh=True)) == 0


def test_index_that_finds_too_little_ends_the_measurement() -> None:
    class Forgetful(IndexDriver):
        def plant_tokens(self, tokens: Tokens) -> None: ...

        def look_up(self, tokens: Tokens, timers: Callable[[str], Timer]) -> int:
            return 0

    with pytest.raises(AssertionError, match="0 tokens of 64"):
        Forgetful([64], 1).measure_lookups(64, is_cached=True, turn=0, by_clock=True)


def test_schedulers_of_the_page_had_the_same_steps() -> None:
    shapes = defaultdict(dict)
    for point in json.loads((RESULTS / "scheduler.json").read_text())["points"]:
        shapes[point["load"], point["running"], point["prompt_tokens"], point["step_tokens"]][point["engine"]] = point
    assert len(shapes) == 16
    for points in shapes.values():
        own_point = points.pop("memserve")
        assert set(points) == {"vLLM", "vLLM async"}
        for point in points.values():
            assert point["rows"] == pytest.approx(own_point["rows"], rel=0.1)
            assert point["tokens"] == pytest.approx(own_point["tokens"], rel=0.2)
