"""Stories of the instance machine: events in, actions out. Each says when it happens in real life."""

from __future__ import annotations

import pytest

from instance_world import PROMPT, VOCAB, building_worlds, lone_beams, outputs_of, plans_of, request, rows
from memserve.base.types import FinishReason, salt_of
from memserve.kv.costs import PreemptionCosts
from memserve.protocol.events import RejectRequest
from memserve_lab.sim.reference.oracle import lone_tokens

make = pytest.fixture(params=["twin", "real"])(building_worlds)


# -- batching


def test_long_prompt_is_chunked_at_block_boundaries(make):
    """A document is pasted into an idle server: pieces of at most 10 tokens, aligned to blocks of 4; two at once."""
    world = make(chunk=10)
    first, second = plans_of(world.arrive(request("a", PROMPT[:21], max_tokens=2)))
    assert rows(first) == [(0, 0, 8, ())] and first.open[0].tokens.tolist() == PROMPT[:21]
    assert rows(second) == [(0, 8, 8, ())] and second.open == []
    (third,) = plans_of(world.step())
    assert rows(third) == [(0, 16, 5, (0,))]
    (fourth,) = plans_of(world.step())  # the first token is sampled by the plan before: its value is not known here
    assert rows(fourth) == [(0, 21, 1, (0,))]


def test_decodes_come_before_prefill_and_share_the_token_budget(make):
    """One client chats while another pastes a document: the chat goes on in every step."""
    world = make(step_tokens=9, chunk=8)
    world.arrive(request("chat", PROMPT[:4], max_tokens=8))
    world.arrive(request("paste", PROMPT[5:30], max_tokens=1))
    (plan,) = plans_of(world.step())
    assert rows(plan) == [(0, 5, 1, (0,)), (1, 0, 8, ())]


def test_priority_orders_the_queue_without_preempting(make):
    """A batch job fills the only slot; of the two that wait the interactive one (lower number) is next."""
    world = make(running=1, depth=1)
    world.arrive(request("job", PROMPT[:4], max_tokens=2, priority=5))
    world.arrive(request("late job", PROMPT[1:5], max_tokens=1, priority=5))
    world.arrive(request("urgent", PROMPT[2:6], max_tokens=1, priority=0))
    world.drain()
    assert list(world.final) == [("job", 0), ("urgent", 0), ("late job", 0)]


def test_no_step_beyond_max_tokens_is_scheduled_ahead(make):
    """The end by length is known in advance, so pipelining costs no wasted token."""
    world = make(depth=3)
    world.arrive(request("a", PROMPT[:4], max_tokens=3))
    world.drain()
    assert world.device.computed_tokens == 4 + 2 and world.machine.stats().dropped_tokens == 0


def test_overshoot_after_stop_token_is_dropped(make):
    """The usual end of a chat answer with two plans in flight."""
    world = make(depth=2)
    stop = lone_tokens(PROMPT[:6], 3, 0, 0, VOCAB)[2]
    expected = lone_tokens(PROMPT[:6], 9, 0, 0, VOCAB)
    expected = expected[: expected.index(stop) + 1]
    world.arrive(request("a", PROMPT[:6], max_tokens=20, stops=[stop]))
    world.drain()
    assert world.got["a", 0] == expected and world.final["a", 0] is FinishReason.STOP
    assert world.machine.stats().dropped_tokens == 1


# -- prefix cache


def test_next_turn_reuses_prompt_and_generated_tokens(make):
    """Turn two contains turn one's prompt and answer: only the rest is computed."""
    world = make()
    world.arrive(request("one", PROMPT[:9], max_tokens=8))
    world.drain()
    history = PROMPT[:9] + world.got["one", 0]  # 17 tokens; the last one's KV was never needed
    plan = plans_of(world.arrive(request("two", [*history, 1, 2, 3], max_tokens=1)))[0]
    assert rows(plan)[0][1:3] == (16, 4)
    (output,) = outputs_of(world.step())
    assert output.cached_tokens == 16


def test_fully_cached_prompt_copies_its_last_block(make):
    """The same request again, for example a retry: the cached block must not be written."""
    world = make()
    for name in ("first", "again"):
        plan = plans_of(world.arrive(request(name, PROMPT[:8], max_tokens=6)))[0]
        if name == "again":
            assert rows(plan)[0][1:3] == (7, 1) and len(plan.copies) == 1
        world.drain()
    assert world.got["first", 0] == world.got["again", 0]
    assert world.machine.stats().copied_on_write == 1


def test_fully_cached_prompt_without_room_recomputes_last_block(make):
    """The pool is exactly as large as the prompt: the copy would be one block too many."""
    world = make(hbm=2)
    for name in ("first", "again"):
        world.arrive(request(name, PROMPT[:8], max_tokens=1))
        world.drain()
    assert world.device.computed_tokens == 8 + 4


def test_original_of_copied_block_can_be_evicted(make):
    """The whole pool is needed by one answer; the cached original of its copied block must make room."""
    world = make(hbm=3, depth=1)
    for name in ("first", "again"):
        world.arrive(request(name, PROMPT[:8], max_tokens=5))
        world.drain()
    assert world.machine.stats().copied_on_write == 1 and world.machine.stats().preemptions_recompute == 0


def test_concurrent_requests_compute_shared_prefix_once(make):
    """Thirty agents start at once with the same system prompt: one computes it, the others wait a few steps."""
    world = make(hbm=60, running=6, step_tokens=64, chunk=8, depth=1)
    for number in range(6):
        world.arrive(request(f"agent {number}", [*PROMPT[:24], number], max_tokens=1))
    world.drain()
    assert world.device.computed_tokens <= 24 + 6 * 1 + 4
    assert world.machine.stats().cached_tokens == 5 * 24


def test_without_cache_nothing_is_read_or_left(make):
    """``use_cache=False`` for a benchmark or a secret prompt."""
    world = make()
    for name in "ab":
        world.arrive(request(name, PROMPT[:8], max_tokens=5, use_cache=False))
        world.drain()
    assert world.machine.stats().cached_tokens == 0 and world.device.computed_tokens == 2 * (8 + 4)
    assert world.machine.stats().hbm.blocks_free == 16


def test_tenants_do_not_share(make):
    """Two customers send the same prompt."""
    world = make()
    for tenant in ("red", "blue"):
        world.arrive(request(tenant, PROMPT[:8], max_tokens=1, tenant=tenant))
        world.drain()
    assert world.machine.stats().cached_tokens == 0


def test_prompt_logprobs_recompute_cached_positions(make):
    """``echo`` with ``logprobs`` on a prompt that was served before."""
    world = make()
    world.arrive(request("plain", PROMPT[:18], max_tokens=1))
    world.drain()
    world.arrive(request("echo", PROMPT[:18], max_tokens=0, prompt_logprobs=True))
    world.drain()
    assert world.got["echo", 0] == [] and world.final["echo", 0] is FinishReason.LENGTH
    assert world.device.computed_tokens == 36


# -- several sequences


def test_parallel_samples_share_prompt_and_copy_partial_block(make):
    """``n = 3``: one row samples for three slots; two of the three copy the half-filled block."""
    world = make(depth=1)
    (plan,) = plans_of(world.arrive(request("a", PROMPT[:6], max_tokens=4, n=3)))
    assert rows(plan) == [(0, 0, 6, (0, 1, 2))]
    assert [opened.index for opened in plan.open] == [0, 1, 2]
    assert len({tuple(opened.blocks) for opened in plan.open}) == 1
    (plan,) = plans_of(world.step())
    assert len(plan.replace) == 2 and sum(len(copy.src) for copy in plan.copies) == 2
    world.drain()
    assert world.device.computed_tokens == 6 + 3 * 3


def test_beam_search_delivers_the_best_at_the_end(make):
    """``beam_width = 3``, ``n = 2``, compared with the search written down plainly (the referee does it)."""
    world = make(hbm=40, running=4)
    req = request("a", PROMPT[:7], max_tokens=6, n=2, beam_width=3, stops=[1])
    world.arrive(req)
    world.drain()
    assert [tuple(world.got["a", i]) for i in (0, 1)] == [tokens for tokens, _, _ in lone_beams(req, 64)]


def test_beams_that_do_not_fit_together_take_turns(make):
    """Four beams in a pool that holds hardly more than one: slow, but it ends, and correctly."""
    world = make(hbm=5, running=4, caching=False)
    world.arrive(request("a", PROMPT[:10], max_tokens=6, beam_width=4))
    world.drain()
    assert world.final["a", 0] in (FinishReason.LENGTH, FinishReason.STOP)


# -- out of blocks


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_youngest_is_preempted_and_resumes_exactly(make, mode):
    """Three long answers outgrow the pool together."""
    world = make(hbm=9, dram=9, preemption=mode, caching=False)
    for name in "abc":
        world.arrive(request(name, PROMPT[ord(name) % 3 : 8], max_tokens=16))
    world.drain()
    stats = world.machine.stats()
    assert next(iter(world.final)) == ("a", 0)
    assert (stats.preemptions_swap > 0) == (mode == "swap")
    assert (stats.preemptions_recompute > 0) == (mode == "recompute")


def test_auto_takes_the_cheaper_by_measured_cost(make):
    """A fast link and a slow model favour swapping, the reverse recomputing."""
    for block_bytes, swaps in ((1, True), (1 << 34, False)):
        world = make(PreemptionCosts(block_bytes=block_bytes), hbm=9, dram=9, caching=False)
        for name in "abc":
            world.arrive(request(name, PROMPT[:8], max_tokens=16))
        world.drain()
        stats = world.machine.stats()
        assert (stats.preemptions_swap > 0) == swaps and (stats.preemptions_recompute > 0) != swaps


def test_swap_without_room_in_dram_becomes_recompute(make):
    """The second tier is full."""
    world = make(hbm=6, dram=1, preemption="swap", caching=False)
    for name in "ab":
        world.arrive(request(name, PROMPT[:8], max_tokens=12))
    world.drain()
    assert world.machine.stats().preemptions_recompute > 0 == world.machine.stats().preemptions_swap


# -- what cannot run


def test_prompt_beyond_context_is_rejected_with_numbers(make):
    """A book is pasted."""
    world = make(context=20)
    (action,) = world.arrive(request("book", PROMPT[:20]))
    assert isinstance(action, RejectRequest) and action.retry_after_s is None
    assert "20 tokens" in action.reason


def test_a_prompt_beyond_the_pool_is_rejected_with_the_numbers(make):
    """The model could, but this instance has memory for 12 tokens only."""
    world = make(hbm=3)
    (action,) = world.arrive(request("long", PROMPT[:13]))
    assert isinstance(action, RejectRequest) and "13 tokens" in action.reason and "is 13" in action.reason


def test_max_tokens_is_clipped_to_the_context(make):
    """Clients ask for 4,096 tokens by habit."""
    world = make(context=20)
    world.arrive(request("a", PROMPT[:10], max_tokens=4096))
    world.drain()
    assert len(world.got["a", 0]) == 10 and world.final["a", 0] is FinishReason.LENGTH


def test_a_full_queue_rejects_with_a_retry_hint(make):
    """A burst: better a clear no with a time than an endless wait."""
    world = make(running=1, waiting=2)
    world.arrive(request("runs", PROMPT[:4], max_tokens=8))
    for name in ("waits", "waits too"):
        world.arrive(request(name, PROMPT[1:5]))
    world.now += 5_000_000_000
    (action,) = world.arrive(request("too many", PROMPT[2:6]))
    assert isinstance(action, RejectRequest) and action.retry_after_s == 5.0


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"prompt": []}, "empty"),
        ({"n": 0}, "at least 1"),
        ({"n": 7}, "7 sequences"),
        ({"n": 3, "beam_width": 2}, "beam_width = 2"),
        ({"salt": salt_of("", "c0de")}, "does not have the adapter"),
    ],
)
def test_impossible_requests_are_rejected(make, wrong, word):
    """The edge validates; the machine does not rely on it."""
    world = make()
    (action,) = world.arrive(request("bad", **{"prompt": PROMPT[:4], **wrong}))
    assert isinstance(action, RejectRequest) and word in action.reason


def test_a_second_request_of_the_same_name_is_rejected(make):
    """A client library reuses an id while the first is running."""
    world = make()
    world.arrive(request("a", PROMPT[:4]))
    (action,) = world.machine.handle(world.diary[0][0], 0)
    assert isinstance(action, RejectRequest) and "'a'" in action.reason
    world.diary.append((world.diary[0][0], 0, repr([action])))
