"""A sequence on three devices, which ask each other over real sockets, against the family's own tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from memserve.base.types import SamplingParams
from memserve.instance.events import Before
from memserve.model.attention.query_server import SegmentPort, SegmentServer, ZmqSegmentLines
from memserve.model.attention.sequence_parallel import Query, SegmentLostError
from memserve.protocol.messages import Segment
from memserve.protocol.peers import Peer
from memserve.transport.network_devices import ListenAddress
from tiny_models import GREEDY, Driver, greedy_tokens, loaded, prompt, sequence, tiny_module

SECRET = "a secret of the tests of segments"
BLOCK = 32


@dataclass
class Holder:
    driver: Driver
    port: SegmentPort
    peer: Peer

    def segment(self, tokens: int) -> Segment:
        return Segment(self.peer, self.port.address, tokens)


@contextmanager
def holders(count: int, family: str = "llama") -> Iterator[list[Holder]]:
    made = []
    try:
        for number in range(count):
            driver = Driver(loaded(tiny_module(family)), blocks=4)
            port = SegmentPort(driver.device, ListenAddress(SECRET), "float32")
            made.append(Holder(driver, port, Peer(f"i{number}", 1)))
        yield made
    finally:
        for holder in made:
            holder.port.close()
            holder.driver.device.close()


def spread(places: list[Holder], tokens: np.ndarray, edges: list[int], sampling: SamplingParams = GREEDY) -> list[int]:
    """The tokens that follow, six of them: each place computes its part in two chunks."""
    segments: tuple[Segment, ...] = ()
    drawn: list[int] = []
    for holder, first, end in zip(places, edges, edges[1:], strict=False):
        before = Before("long", tokens[:first], segments) if segments else None
        part, blocks = tokens[first:end], [2, 0, 3, 1]
        opened = sequence(0, part, blocks[: -(-len(part) // BLOCK)], sampling, before=before)
        half = len(part) // 2
        holder.driver.step([(0, 0, half, ())], open=[opened])
        drawn = holder.driver.step([(0, half, len(part) - half, (0,))]).tokens
        if holder is not places[-1]:
            holder.port.held_kv.hold_segment("long", opened.blocks, len(part))
            segments = (*segments, holder.segment(len(part)))
    last = places[-1].driver
    grow = [(0, [1])] if (edges[-1] - edges[-2]) % BLOCK == 0 else []
    drawn += last.step([(0, edges[-1] - edges[-2], 1, (0,))], grow=grow).tokens
    return drawn + last.decode(0, edges[-1] - edges[-2] + 1, 4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_three_devices_give_the_families_own_tokens(family: str) -> None:
    tokens = prompt(230, 5)
    with holders(3, family) as places:
        drawn = spread(places, tokens, [0, 96, 192, 230])
    assert drawn == greedy_tokens(tiny_module(family), tokens, 6)


def test_penalties_and_seeds_see_the_whole_sequence() -> None:
    sampling = SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.4, frequency_penalty=0.5)
    tokens = prompt(150, 6)
    one = Driver(loaded(tiny_module("llama")))
    expected = one.step([(0, 0, 150, (0,))], open=[sequence(0, tokens, [1, 2, 3, 4, 5], sampling)]).tokens
    expected += one.decode(0, 150, 5)
    with holders(2) as places:
        assert spread(places, tokens, [0, 96, 150], sampling) == expected


def test_lost_segment_fails_only_its_row() -> None:
    tokens, other = prompt(130, 7), prompt(20, 8)
    expected = greedy_tokens(tiny_module("llama"), other, 3)
    with holders(2) as (first, last):
        first.driver.step([(0, 0, 96, (0,))], open=[sequence(0, tokens[:96], [0, 1, 2])])
        first.port.held_kv.hold_segment("long", [0, 1, 2], 96)
        before = Before("long", tokens[:96], (first.segment(96),))
        rows = [(0, 0, 34, (0,)), (1, 0, 20, (1,))]
        opened = [sequence(0, tokens[96:], [0, 1], before=before), sequence(1, other, [3])]
        got = last.driver.step(rows, open=opened)
        assert got.tokens == [greedy_tokens(tiny_module("llama"), tokens, 1)[0], expected[0]] and not got.failed
        first.port.held_kv.drop_segment("long")
        broken = last.driver.step([(0, 34, 1, (0,)), (1, 20, 1, (1,))])
        assert broken.tokens[1] == expected[1] and list(broken.failed) == [0]
        assert broken.failed[0].reason == ""  # the instance failed, not the request
        again = last.driver.step([(0, 35, 1, (0,)), (1, 21, 1, (1,))])
        assert again.tokens[1] == expected[2] and list(again.failed) == [0]


def query(tokens: int = 1) -> Query:
    return Query("x", 0, torch.zeros((tokens, 4, 8)), 1.0, 0.0)


def room(tokens: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty((tokens, 4, 8)), torch.empty((tokens, 4))


def test_segment_dropped_during_read_gives_no_result() -> None:
    """The blocks may have another sequence's KV by the time that all of them are read."""
    with holders(1) as (holder,):
        held = holder.port.held_kv
        q = torch.zeros((1, 4, 8))
        holder.driver.step([(0, 0, 32, (0,))], open=[sequence(0, prompt(32, 1), [0])])
        held.hold_segment("x", [0], 32)
        assert held.answer_query(Query("x", 0, q, 1.0, 0.0)) is not None


def test_answers_come_to_their_questions_and_strangers_get_none() -> None:
    def attend(asked: Query) -> tuple[torch.Tensor, torch.Tensor]:
        return asked.q + asked.layer, torch.full(asked.q.shape[:2], float(asked.layer))

    server = SegmentServer(ListenAddress(SECRET), "float32", attend)
    lines, stranger = ZmqSegmentLines(SECRET), ZmqSegmentLines("another secret of these tests", answer_s=0.3)
    segment = Segment(Peer("i", 1), server.address, 32)
    try:
        numbers = [lines.send_query(segment, Query("x", layer, torch.ones((3, 4, 8)), 1.0, 0.0)) for layer in range(5)]
        for layer in (3, 0, 4, 1, 2):  # answers that come early are kept
            outputs, statistics = room(3)
            lines.receive_answer(numbers[layer], outputs, statistics)
            assert outputs.unique().tolist() == [1.0 + layer] and statistics.unique().tolist() == [float(layer)]
        with pytest.raises(SegmentLostError, match="not answered"):
            stranger.receive_answer(stranger.send_query(segment, query()), *room())
    finally:
        lines.close()
        stranger.close()
        server.close()


def test_nothing_waits_for_a_holder_that_is_gone() -> None:
    server = SegmentServer(ListenAddress(SECRET), "float32", lambda asked: None)
    segment = Segment(Peer("i", 1), server.address, 32)
    lines = ZmqSegmentLines(SECRET)
    try:
        with pytest.raises(SegmentLostError, match="does not have it"):
            lines.receive_answer(lines.send_query(segment, query()), *room())
        server.close()
        number, began_s = lines.send_query(segment, query()), time.monotonic()
        lines.remove_peer(segment.peer)
        with pytest.raises(SegmentLostError, match="is gone"):
            lines.receive_answer(number, *room())
        assert time.monotonic() - began_s < 2
    finally:
        lines.close()
        server.close()
