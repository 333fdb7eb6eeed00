"""Prompts that several instances compute at once: what each computes, reads and keeps, and what a failure leaves."""

from __future__ import annotations

import pytest
from msgspec import structs

from fleet_world import BLOCK, LAYERS, ROUTER_PEER, Fleet, Job, computed, fleet_config
from instance_world import PROMPT, request
from memserve.base.types import SamplingParams, StopParams
from memserve.protocol.messages import Cancel, Dispatch, Offer, Ready, RequestRefused, Span, Stripe, Withdraw

STRIPE = 2 * BLOCK


def fleet(names="abc", **sizes):
    return Fleet(**{name: fleet_config(**sizes) for name in names})


def long_request(name="r", tokens=6 * STRIPE - 3, **more):
    prompt = [token + place % 3 for place, token in enumerate((PROMPT * 4)[:tokens])]
    return request(name, prompt, **({"max_tokens": 5, "seed": 3} | more))


def divide(it, req, owners, first=STRIPE):
    """Let the members ``owners`` compute stripes of ``req``, in this order; the last one runs it. ``first``: tokens of
    the first stripe."""
    tokens = [first] + [STRIPE] * (len(owners) - 2)
    tokens.append(len(req.prompt) - sum(tokens))
    stripes = tuple(Stripe(it.members[name].peer, count) for name, count in zip(owners, tokens, strict=True))
    job = it.jobs[req.request_id] = Job(
        req, {"first": owners[-1], "decode_at": None}, involved=tuple(dict.fromkeys(owners))
    )
    for name in job.involved:
        last = max(place for place, owner in enumerate(owners) if owner == name)
        order = structs.replace(req, request_id=job.attempt_id, prompt=req.prompt[: sum(tokens[: last + 1])])
        holds = name != owners[-1]
        if holds:
            order = structs.replace(order, n=1, sampling=SamplingParams(temperature=0.0), stop=StopParams(max_tokens=2))
        span = Span(req.prompt[:0], (), holds, stripes)
        it.send(ROUTER_PEER, it.members[name].peer, Dispatch(order, span=span))
    return job


def end(it, job):
    """All of it: the others are released when the runner has drawn."""
    it.run(lambda: job.done)
    release(it, job)
    it.finish()


def release(it, job):
    """As the router does, if the first attempt has come so far."""
    for name in set(job.involved) - {job.orders["first"]} if not job.attempt else ():
        it.send(ROUTER_PEER, it.members[name].peer, Cancel(job.attempt_id))
    it.run()


def said(it, name, kind):
    return [message for message in it.members[name].said if isinstance(message, kind)]


def cached(it, name, job):
    return it.members[name].machine.pool.match("", job.request.prompt)


def test_each_computes_its_stripes_and_the_answer_is_right() -> None:
    it = fleet()
    job = divide(it, long_request(), "abcabc")
    it.run(lambda: job.done)
    assert not it.refused and not job.attempt
    assert [computed(it, name) for name in "abc"] == [2 * STRIPE, 2 * STRIPE, 2 * STRIPE - 3 + 4]
    release(it, job)
    assert cached(it, "c", job) >= 5 * STRIPE, "the runner's is an ordinary sequence"
    assert not cached(it, "a", job) and not cached(it, "b", job), "the others keep nothing"
    it.finish()


def test_row_begins_one_layer_behind_the_stripe_before_it() -> None:
    """And not before: the first instance has computed one layer, and two are at work."""
    it = fleet("ab")
    job = divide(it, long_request(tokens=2 * STRIPE), "ab")
    a, b = it.members["a"], it.members["b"]
    it.run(lambda: a.layers_told == 1)
    assert not b.plans
    it.run(lambda: b.plans)
    assert a.layers_told < LAYERS, "the first stripe is still computed"
    (gate,) = b.plans[0].gates.values()
    assert 1 <= b.gates[gate] < LAYERS
    end(it, job)
    assert not job.attempt and not it.refused


def test_last_layer_is_announced_when_its_row_has_not_failed() -> None:
    it = fleet("ab")
    job = divide(it, long_request(tokens=2 * STRIPE), "ab")
    a = it.members["a"]
    it.run(lambda: a.layers_told == LAYERS)
    it.run(lambda: not a.jobs and not it.wires)
    assert max(ready.end_layer for ready in said(it, "a", Ready)) == LAYERS - 1
    assert not it.members["b"].machine.link.striped.completed
    end(it, job)
    assert not job.attempt and max(ready.end_layer for ready in said(it, "a", Ready)) == LAYERS


def test_what_is_cached_is_offered_at_once_and_not_asked_for() -> None:
    it = fleet("abc")
    for name in "cb":  # all of the first stripe, and a block of it
        earlier = it.submit(long_request(name, tokens=4 * STRIPE if name == "c" else BLOCK, max_tokens=1), name)
        it.run(lambda job=earlier: job.done)
    before = {name: computed(it, name) for name in "abc"}
    job = divide(it, long_request(), "cabc", first=3 * STRIPE)
    it.run(lambda: job.done)
    assert [computed(it, name) - before[name] for name in "abc"] == [STRIPE, STRIPE, STRIPE - 3 + 4]
    pulled = {name: it.members[name].machine.link.exchange.counters.pulled_bytes for name in "abc"}
    page_bytes = it.geometry.page_bytes * LAYERS
    assert pulled["a"] == 6 * page_bytes and pulled["b"] == (5 + 2) * page_bytes, "but for what it has"
    assert pulled["c"] == 2 * page_bytes, "of the two stripes that a and b compute, it has had the first"
    release(it, job)
    it.finish()


def test_first_row_behind_cached_blocks_of_its_own_stripe() -> None:
    it = fleet("ab")
    earlier = it.submit(long_request("earlier", tokens=BLOCK, max_tokens=1), "a")
    it.run(lambda: earlier.done)
    job = divide(it, long_request(), "ababab")
    end(it, job)
    assert not job.attempt and computed(it, "a") == BLOCK + 3 * STRIPE - BLOCK


def test_parallel_answers_fork_from_a_prompt_in_stripes() -> None:
    it = fleet()
    job = divide(it, long_request(n=3), "abcabc")
    end(it, job)
    assert not job.attempt and len({tuple(job.got[index]) for index in range(3)}) > 1


def test_others_are_served_meanwhile() -> None:
    it = fleet("ab", running=4)
    job = divide(it, long_request(), "ababab")
    jobs = [
        it.submit(request(f"s{number}", PROMPT[: 5 + number], max_tokens=6), "ab"[number % 2]) for number in range(4)
    ]
    it.run(lambda: job.done and all(other.done for other in jobs))
    assert not job.attempt and not it.refused
    release(it, job)
    it.finish()


@pytest.mark.parametrize("kind", [Offer, Ready])
def test_lost_message_ends_the_attempt_and_nothing_is_wrong(kind: type) -> None:
    it, lost = fleet(), []

    def lose(sender, to, message):
        hit = isinstance(message, kind) and sender.name == "b" and not lost
        lost.extend([message] * hit)
        return hit

    it.lose = lose
    job = divide(it, long_request(), "abcabc")
    it.finish()
    assert lost and job.attempt and any("a stripe is lost" in refused.reason for refused in it.refused)


def test_late_stripe_is_given_up_without_its_offer() -> None:
    """The instance with the first stripe has not got its order: the others have nothing to wait for in the end."""
    it = fleet()
    it.lose = lambda sender, to, message: isinstance(message, Dispatch) and to.name == "a" and message.span is not None
    job = divide(it, long_request(), "abcabc")
    it.run()
    assert not job.got and len(it.members["b"].machine.state.prefilling.items) == 1
    assert it.members["b"].machine.next_deadline_ns is not None
    it.finish()
    assert job.attempt and any("has not come in time" in refused.reason for refused in it.refused)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_killed_member_costs_the_attempt_alone(name: str) -> None:
    it = fleet()
    job = divide(it, long_request(), "abcabc")
    it.run(lambda: computed(it, "b") >= STRIPE)
    it.kill(name)
    it.finish()
    assert job.attempt == 1


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_failed_step_costs_the_attempt_alone(name: str) -> None:
    it = fleet()
    job = divide(it, long_request(), "abcabc")
    member = it.members[name]
    it.run(lambda: member.plans and member.layers_told == 2)
    member.do_plan(fail=1)
    it.finish()
    assert job.attempt and (name == "c" or any(isinstance(message, Withdraw) for message in member.said))


def test_preempted_part_is_not_computed_again_here() -> None:
    it = fleet()
    job = divide(it, long_request(), "abcabc")
    member = it.members["b"]
    it.run(lambda: computed(it, "b") == STRIPE and not member.plans)
    member.stand_still()
    it.finish()
    assert job.attempt == 1 and any("preempted" in refused.reason for refused in it.refused)


def test_nothing_is_cached_before_the_prompt_is_complete() -> None:
    it = fleet()
    job = divide(it, long_request(), "abcabc")
    it.run(lambda: computed(it, "c") >= STRIPE)
    assert not any(cached(it, name, job) for name in "abc")
    it.members["c"].hear(Cancel(job.attempt_id))
    assert not cached(it, "c", job), "nor when it has come to nothing"
    it.finish()
    assert job.attempt == 1


def test_two_prompts_in_opposite_orders_both_end() -> None:
    it = fleet("ab", hbm=60, running=4)
    jobs = [
        divide(it, long_request(f"r{number}", seed=number), "ababab" if number else "bababa") for number in range(2)
    ]
    it.run(lambda: all(job.done for job in jobs))
    assert not it.refused and not any(job.attempt for job in jobs)
    for job in jobs:
        release(it, job)
    it.finish()


def test_part_of_a_sequence_that_fits_none_is_refused_meanwhile() -> None:
    """It would hold memory that the prompt needs, and wait for others that wait for that."""
    it = fleet("ab")
    job = divide(it, long_request(), "ababab")
    it.run(lambda: computed(it, "b"))
    other = long_request("other", tokens=STRIPE)
    order = Dispatch(structs.replace(other, request_id="other#0"), span=Span(other.prompt[:0], (), True))
    it.members["b"].hear(order)
    assert "another long sequence" in said(it, "b", RequestRefused)[0].reason
    it.run(lambda: job.done)
    release(it, job)
    it.finish()


def test_stripes_that_make_up_no_prompt_are_refused() -> None:
    it = fleet("ab")
    req = long_request(tokens=2 * STRIPE)
    bounds = tuple(Stripe(it.members[name].peer, STRIPE + 1) for name in "ab")
    it.jobs["r"] = Job(req, {"first": "b", "decode_at": None}, involved=("a", "b"))
    it.send(
        ROUTER_PEER,
        it.members["b"].peer,
        Dispatch(structs.replace(req, request_id="r#0"), span=Span(req.prompt[:0], (), False, bounds)),
    )
    it.finish()
    assert "do not make up its prompt" in it.refused[0].reason
