"""What the connector thinks in vLLM's scheduler, call by call as vLLM makes them; look-ups are told what they find."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from memserve.integrations.vllm.scheduler import _QUEUED_NS as QUEUED_NS
from memserve.integrations.vllm.scheduler import EngineBlocks, KvLoad, Save, SchedulerSide

BLOCK = 4
WAIT_NS = 100


class Lookups:
    """What the store has, and what is held for which request."""

    def __init__(self, *stored: bytes) -> None:
        self.stored = set(stored)
        self.is_known = True
        self.is_mapped = True
        self.is_full = False
        self.room = 1 << 20
        self.held: dict[str, int | None] = {}
        self.asked: dict[str, list[bytes]] = {}

    def prefix_at_once(self, hashes: Sequence[bytes]) -> int | None:
        if not self.is_mapped:
            return None
        return next((at for at, one in enumerate(hashes) if one not in self.stored), len(hashes))

    def missing_at_once(self, hashes: Sequence[bytes]) -> list[list[bool]]:
        return [[one not in self.stored for one in hashes]]

    def has_room(self, blocks: int) -> bool:
        return not self.held or blocks + sum(len(self.asked[one]) for one in self.held) <= self.room

    def start_lookup(self, request_id: str, hashes: Sequence[bytes]) -> bool:
        if self.is_full:
            return False
        self.held[request_id], self.asked[request_id] = None, list(hashes)
        return True

    def lookup_result(self, request_id: str) -> int | None:
        return self.held[request_id]

    def forget_request(self, request_id: str) -> None:
        self.held.pop(request_id, None)

    def found(self, request_id: str, count: int | None = None) -> None:
        """The look-up has come to its end."""
        self.held[request_id] = len(self.asked[request_id]) if count is None else count


def request_of(blocks: int, tokens: int | None = None, request_id: str = "r", every: int = 1) -> Any:
    """With full blocks ``h0``, ``h1``...; ``tokens``: beyond them one by default."""
    hashes = [b"h%d" % at for at in range(blocks)] if every == 1 else [b"half%d" % at for at in range(blocks * every)]
    return SimpleNamespace(
        request_id=request_id, block_hashes=hashes, num_tokens=tokens or blocks * BLOCK + 1, num_computed_tokens=0
    )


def side_of(lookups: Lookups, every: int = 1) -> SchedulerSide:
    return SchedulerSide(lookups, EngineBlocks(BLOCK, every), WAIT_NS)


def step_of(tokens: dict[str, int], tables: dict[str, list[int]] | None = None) -> Any:
    """A step as 0.30 and later describe it."""
    state = SimpleNamespace(get_block_ids=lambda request_id: (tables[request_id],) if tables else None)
    return SimpleNamespace(num_scheduled_tokens=tokens, kv_connector_block_state=state)


def ids(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


# -- prompts that another engine has computed


def computed(blocks: int, tokens: int, **params: Any) -> Any:
    """A request whose first ``tokens`` another engine says to have computed."""
    request = request_of(blocks)
    request.kv_transfer_params = {"do_remote_prefill": True, "remote_num_tokens": tokens, **params}
    return request


def test_prefix_of_another_engine_is_awaited() -> None:
    lookups = Lookups(b"h0")
    side, request = side_of(lookups), computed(3, 12)
    assert side.match_request(request, 0, 0) == (None, False) and not lookups.asked
    lookups.stored |= {b"h1", b"h2"}
    assert side.match_request(request, 0, 1) == (None, False) and len(lookups.asked["r"]) == 3
    lookups.found("r")
    assert side.match_request(request, 0, 2) == (12, True)
    side.on_request_finished("r")
    assert side.is_idle and not lookups.held


@pytest.mark.parametrize("stored", [0, 2])
def test_awaited_prefix_is_computed_at_the_deadline(stored: int) -> None:
    lookups = Lookups(*[b"h%d" % at for at in range(stored)])
    side, request = side_of(lookups), computed(3, 12)
    assert side.match_request(request, 0, 0) == side.match_request(request, 0, WAIT_NS - 1) == (None, False)
    if stored:
        assert side.match_request(request, 0, WAIT_NS) == (None, False) and len(lookups.asked["r"]) == 2
        lookups.found("r")
    for later in (1, 2, WAIT_NS * 3):
        assert side.match_request(request, 0, WAIT_NS + later) == (stored * BLOCK, stored > 0)
    side.on_request_finished("r")
    assert side.is_idle


def test_damaged_prefix_is_not_awaited() -> None:
    lookups = Lookups(b"h0", b"h1", b"h2")
    side, request = side_of(lookups), computed(3, 12)
    side.match_request(request, 0, 0)
    lookups.found("r", 1)
    assert side.match_request(request, 0, 1) == (4, True)


def test_a_store_that_must_be_asked_is_asked_again() -> None:
    lookups = Lookups(b"h0", b"h1", b"h2")
    lookups.is_mapped = False
    side, request = side_of(lookups), computed(3, 12)
    assert side.match_request(request, 0, 0) == (None, False)
    lookups.found("r", 1)
    assert side.match_request(request, 0, 1) == (None, False)
    assert side.match_request(request, 0, 2) == (None, False) and "r" in lookups.held
    lookups.found("r", 1)
    assert side.match_request(request, 0, WAIT_NS) == (4, True), "less is better than none at the deadline"


@pytest.mark.parametrize("params", [{"remote_num_tokens": None}, {"remote_num_tokens": "9"}, {"do_remote_prefill": 0}])
def test_other_words_await_nothing(params: dict[str, Any]) -> None:
    assert side_of(Lookups()).match_request(computed(3, 12, **params), 0, 0) == (0, False)


def test_prefix_cached_in_vllm_is_not_awaited() -> None:
    assert side_of(Lookups()).match_request(computed(3, 8), 8, 0) == (0, False)


def test_kept_tokens_of_a_prompt_are_reported() -> None:
    lookups = Lookups(b"h0")
    side, request = side_of(lookups), request_of(2)
    side.on_blocks_allocated(request, [ids(3)], 0)
    assert side.stored_tokens(request) == 0
    side.plan_step(step_of({"r": 9}, {"r": ids(3)}), 0)
    assert side.stored_tokens(request) == 8


# -- promises


def test_absent_prefix_costs_no_lookup() -> None:
    lookups = Lookups()
    side = side_of(lookups)
    assert side.match_request(request_of(3), 0, 0) == (0, False)
    assert not lookups.asked and side.is_idle


def test_hit_is_reported_once_held_and_verified() -> None:
    lookups = Lookups(b"h0", b"h1", b"h2")
    side, request = side_of(lookups), request_of(3)
    assert side.match_request(request, 0, 0) == (None, False)
    assert side.match_request(request, 0, 1) == (None, False)
    lookups.found("r")
    assert side.match_request(request, 0, 2) == (12, True)
    assert side.match_request(request, 0, 3) == (12, True), "asking changes nothing"
    side.on_blocks_allocated(request, [ids(3)], 12)
    assert side.plan_step(step_of({}), 4).loads == (KvLoad("r", (b"h0", b"h1", b"h2"), (10, 11, 12)),)
    assert side.plan_step(step_of({}), 5).loads == ()
    assert "r" in lookups.held, "held until the workers have read it"
    side.on_loads_received(["r"], ())
    assert "r" not in lookups.held
    side.on_blocks_allocated(request, [ids(4)], 0)
    side.on_request_finished("r")
    assert side.is_idle


def test_match_leaves_one_token_to_compute() -> None:
    lookups = Lookups(b"h0", b"h1")
    side = side_of(lookups)
    side.match_request(request_of(2, tokens=8), 0, 0)
    assert lookups.asked["r"] == [b"h0"]


def test_blocks_that_vllm_has_are_not_loaded() -> None:
    lookups = Lookups(b"h0", b"h1", b"h2")
    side, request = side_of(lookups), request_of(3)
    side.match_request(request, 4, 0)
    assert lookups.asked["r"] == [b"h1", b"h2"]
    lookups.found("r")
    assert side.match_request(request, 4, 1) == (8, True)
    assert side.match_request(request, 8, 2) == (4, True), "vLLM has got one more meanwhile"
    side.on_blocks_allocated(request, [ids(3)], 4)
    assert side.plan_step(step_of({}), 3).loads == (KvLoad("r", (b"h2",), (12,)),)


def test_vllm_has_fewer_than_at_the_first_question() -> None:
    lookups = Lookups(b"h0", b"h1", b"h2")
    side, request = side_of(lookups), request_of(3)
    side.match_request(request, 8, 0)
    lookups.found("r")
    assert side.match_request(request, 0, 1) == (None, False), "it is looked up again from the first block on"
    assert lookups.asked["r"] == [b"h0", b"h1", b"h2"]


def test_damaged_block_ends_the_reported_hit() -> None:
    lookups = Lookups(b"h0", b"h1", b"h2")
    side, request = side_of(lookups), request_of(3)
    side.match_request(request, 0, 0)
    lookups.found("r", 1)
    assert side.match_request(request, 0, 1) == (4, True)


@pytest.mark.parametrize("how", ["late", "nothing"])
def test_nothing_in_time_is_computed_and_not_asked_again(how: str) -> None:
    lookups = Lookups(b"h0")
    side, request = side_of(lookups), request_of(1)
    assert side.match_request(request, 0, 0) == (None, False)
    if how == "nothing":
        lookups.found("r", 0)
    at = WAIT_NS if how == "late" else 1
    assert side.match_request(request, 0, at) == (0, False)
    assert not lookups.held
    assert side.match_request(request, 0, at + 1) == (0, False)
    side.on_request_finished("r")
    assert side.is_idle


def test_too_much_under_way() -> None:
    lookups = Lookups(b"h0")
    lookups.is_full = True
    assert side_of(lookups).match_request(request_of(1), 0, 0) == (0, False)


def test_a_request_waits_for_room_beside_what_others_hold() -> None:
    """It would lose its hit otherwise, since a client may hold a part of the store's memory."""
    lookups = Lookups(*(b"h%d" % at for at in range(6)))
    lookups.room = 6
    side = side_of(lookups)
    first, second = request_of(4, request_id="a"), request_of(4, request_id="b")
    assert side.match_request(first, 0, now_ns=0) == side.match_request(second, 0, now_ns=1) == (None, False)
    lookups.found("a")
    assert side.match_request(first, 0, now_ns=WAIT_NS) == (16, True)
    assert side.match_request(second, 0, now_ns=WAIT_NS * 2) == (None, False) and "b" not in lookups.held
    side.on_blocks_allocated(first, [ids(5)], 16)
    assert side.match_request(second, 0, now_ns=WAIT_NS * 3) == (None, False) and "b" not in lookups.held
    side.on_loads_received(["a"], [])
    assert side.match_request(second, 0, now_ns=WAIT_NS * 4) == (None, False) and "b" in lookups.held
    lookups.found("b")
    assert side.match_request(second, 0, now_ns=WAIT_NS * 4) == (16, True)


def test_nothing_waits_for_ever_for_what_others_hold() -> None:
    lookups = Lookups(*(b"h%d" % at for at in range(6)))
    lookups.room = 4
    side = side_of(lookups)
    first, second = request_of(4, request_id="a"), request_of(4, request_id="b")
    assert side.match_request(first, 0, now_ns=0) == side.match_request(second, 0, now_ns=0) == (None, False)
    assert side.match_request(second, 0, now_ns=QUEUED_NS - 1) == (None, False) and "b" not in lookups.held
    assert side.match_request(second, 0, now_ns=QUEUED_NS) == (None, False) and "b" in lookups.held


def test_a_store_that_has_to_be_asked() -> None:
    lookups = Lookups()
    lookups.is_mapped = False
    assert side_of(lookups).match_request(request_of(2), 0, 0) == (None, False)
    assert lookups.asked["r"] == [b"h0", b"h1"]


def test_requests_that_must_compute() -> None:
    lookups = Lookups(b"h0")
    side, request = side_of(lookups), request_of(1)
    request.skip_reading_prefix_cache = True
    assert side.match_request(request, 0, 0) == (0, False)
    lookups.is_known = False
    assert side.match_request(request_of(1), 0, 0) == (0, False)


def test_engines_that_only_load_or_only_save() -> None:
    lookups, request = Lookups(b"h0"), request_of(2)
    reader = SchedulerSide(lookups, EngineBlocks(BLOCK, 1, saves=False), WAIT_NS)
    writer = SchedulerSide(lookups, EngineBlocks(BLOCK, 1, loads=False), WAIT_NS)
    assert reader.match_request(request, 0, 0) == (None, False) and writer.match_request(request, 0, 0) == (0, False)
    for side in (reader, writer):
        side.on_blocks_allocated(request, [ids(3)], 0)
    step = step_of({"r": 9}, {"r": ids(3)})
    assert reader.plan_step(step, 0).saves == () and writer.plan_step(step, 0).saves == (Save((b"h1",), (11,)),)


def test_another_loads_it() -> None:
    """vLLM allocates without what was promised: the plan is forgotten, and nothing is loaded."""
    lookups = Lookups(b"h0")
    side, request = side_of(lookups), request_of(1)
    side.match_request(request, 0, 0)
    lookups.found("r")
    assert side.match_request(request, 0, 1) == (4, True)
    side.on_blocks_allocated(request, [ids(2)], 0)
    assert side.plan_step(step_of({}), 2).loads == () and not lookups.held


def test_a_request_that_ends_before_its_load() -> None:
    lookups = Lookups(b"h0")
    side, request = side_of(lookups), request_of(1)
    side.match_request(request, 0, 0)
    side.on_request_finished("r")
    assert side.is_idle and not lookups.held
    side.match_request(request, 0, 0)
    lookups.found("r")
    side.match_request(request, 0, 1)
    side.on_blocks_allocated(request, [ids(1)], 4)
    side.on_request_finished("r")
    assert lookups.held, "its load is under way, and its blocks are kept"
    side.plan_step(step_of({}), 2)
    side.on_loads_received(["r"], ())
    assert side.is_idle and not lookups.held


def test_a_failed_load_is_computed_and_not_tried_again() -> None:
    lookups = Lookups(b"h0", b"h1")
    side, request = side_of(lookups), request_of(2)
    side.match_request(request, 0, 0)
    lookups.found("r")
    side.match_request(request, 0, 1)
    side.on_blocks_allocated(request, [ids(2)], 8)
    side.plan_step(step_of({}), 2)
    side.on_loads_received([], {11})  # said a step before the request is
    side.on_loads_received(["r"], ())
    assert side.match_request(request, 0, 3) == (0, False) and not lookups.held
    side.on_request_finished("r")
    assert side.is_idle


# -- saves


def test_full_blocks_are_saved_from_vllms_table() -> None:
    lookups, request = Lookups(b"h1"), request_of(3, tokens=14)
    side = side_of(lookups)
    side.on_blocks_allocated(request, [ids(4)], 0)
    assert side.plan_step(step_of({"r": 6}, {"r": ids(4)}), 0).saves == (Save((b"h0",), (10,)),)
    request.num_computed_tokens = 6
    assert side.plan_step(step_of({"r": 8}, {"r": ids(4)}), 0).saves == (Save((b"h2",), (12,)),), "h1 is there"
    assert side.plan_step(step_of({"r": 8}, {"r": ids(4)}), 0).saves == ()


def test_tokens_that_are_only_guessed_are_not_saved() -> None:
    lookups, request = Lookups(), request_of(2, tokens=9)
    side = side_of(lookups)
    request.block_hashes.append(b"never")
    request.num_computed_tokens = 8
    side.on_blocks_allocated(request, [ids(4)], 0)
    orders = side.plan_step(step_of({"r": 5}, {"r": ids(4)}), 0)  # one token, four drafts
    assert orders.saves == (Save((b"h0", b"h1"), (10, 11)),)


def test_blocks_without_content_are_not_saved() -> None:
    side, request = side_of(Lookups()), request_of(2)
    side.on_blocks_allocated(request, [[0, 5]], 0)
    assert side.plan_step(step_of({"r": 9}, {"r": [0, 5]}), 0).saves == (Save((b"h1",), (5,)),)


def test_a_block_of_two_requests_is_saved_once() -> None:
    side = side_of(Lookups())
    for name in "ab":
        side.on_blocks_allocated(request_of(1, request_id=name), [ids(2)], 0)
    tables = {"a": ids(2), "b": ids(2, 20)}
    assert len(side.plan_step(step_of({"a": 5, "b": 5}, tables), 0).saves) == 1
    side.forget_offers()
    assert len(side.plan_step(step_of({"a": 5, "b": 5}, tables), 0).saves) == 1


def test_block_refused_by_store_is_saved_again_later() -> None:
    side = side_of(Lookups())
    for name, at in (("a", 0), ("b", 1_000_000), ("c", 60_000_000_000)):
        side.on_blocks_allocated(request_of(1, request_id=name), [ids(2)], 0)
        saves = side.plan_step(step_of({name: 5}, {name: ids(2)}), at).saves
        assert bool(saves) == (name != "b")


def test_hashes_of_parts_of_a_block() -> None:
    lookups = Lookups()
    side, request = side_of(lookups, every=2), request_of(2, every=2)
    side.on_blocks_allocated(request, [ids(3)], 0)
    assert side.plan_step(step_of({"r": 9}, {"r": ids(3)}), 0).saves == (Save((b"half1", b"half3"), (10, 11)),)


def added_step(tokens: int, new: Any = (), cached: Any = ((), (), ()), state: Any = None) -> Any:
    """A step as versions up to 0.29 describe it: new requests, and what the others got in addition."""
    more = SimpleNamespace(req_ids=cached[0], new_block_ids=cached[1], resumed_req_ids=set(cached[2]))
    return SimpleNamespace(
        num_scheduled_tokens={"r": tokens},
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=more,
        kv_connector_block_state=state,
    )


def test_tables_of_versions_that_do_not_say_them() -> None:
    """Up to 0.28: new requests bring a table, later steps what is added, and preempted ones begin anew."""
    side, request = side_of(Lookups()), request_of(4, tokens=18)
    side.on_blocks_allocated(request, [[]], 0)

    step = added_step
    first = step(5, [SimpleNamespace(req_id="r", block_ids=([10, 11],))])
    assert side.plan_step(first, 0).saves == (Save((b"h0",), (10,)),)
    request.num_computed_tokens = 5
    assert side.plan_step(step(4, cached=(["r"], [([12],)], [])), 0).saves == (Save((b"h1",), (11,)),)
    request.num_computed_tokens = 9
    assert side.plan_step(step(1, cached=(["r"], [None], [])), 0).saves == ()
    request.num_computed_tokens = 0
    again = step(18, cached=(["r"], [([20, 21, 22, 23, 24],)], ["r"]))
    assert side.plan_step(again, 0).saves == (Save((b"h2", b"h3"), (22, 23)),)


def test_tables_of_a_version_that_says_those_that_changed() -> None:
    """0.29: a snapshot of a request that got blocks, nothing of one that goes on in those that it has."""
    side, request = side_of(Lookups()), request_of(3, tokens=14)
    side.on_blocks_allocated(request, [[]], 0)
    new = [SimpleNamespace(req_id="r", block_ids=([10, 11],))]
    first = added_step(5, new, state=SimpleNamespace(block_ids={"r": ([30, 31],)}))
    assert side.plan_step(first, 0).saves == (Save((b"h0",), (30,)),)
    request.num_computed_tokens = 5
    same = added_step(3, cached=(["r"], [None], []), state=SimpleNamespace(block_ids={}))
    assert side.plan_step(same, 0).saves == (Save((b"h1",), (31,)),)
    request.num_computed_tokens = 8
    grown = added_step(4, cached=(["r"], [([32],)], []), state=SimpleNamespace(block_ids={"r": ([30, 31, 32],)}))
    assert side.plan_step(grown, 0).saves == (Save((b"h2",), (32,)),)
    side.on_request_finished("r")
    assert side.is_idle


def test_random_lives_leave_nothing_behind() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        lookups = Lookups(*(b"h%d" % at for at in range(rng.randrange(5))))
        side, request, now = side_of(lookups), request_of(4, tokens=18), 0
        allocated = False
        for _ in range(rng.randrange(1, 12)):
            now += rng.randrange(60)
            if lookups.held.get("r", 0) is None and rng.random() < 0.5:
                lookups.found("r", rng.randrange(len(lookups.asked["r"]) + 1))
            if not allocated:
                count, is_async = side.match_request(request, 4 * rng.randrange(3), now)
                assert not (is_async and not count)
                if count is not None and rng.random() < 0.5:
                    side.on_blocks_allocated(request, [ids(5)], count)
                    allocated = True
            else:
                orders = side.plan_step(step_of({"r": rng.randrange(1, 18)}, {"r": ids(5)}), now)
                for load in orders.loads:
                    assert len(load.hashes) == len(load.block_ids) and "r" in lookups.held
        side.plan_step(step_of({}), now)
        side.on_request_finished("r")
        side.on_loads_received(["r"], ())
        assert side.is_idle and not lookups.held
