"""Which prompts are divided into stripes, among which instances, and what is expected of that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from cluster_world import BLOCK, a_request, info
from memserve.base.config import ClusterConfig
from memserve.base.types import FinishReason, KVGeometry, Role, TokenOutput
from memserve.base.units import NS_PER_MS
from memserve.kv.costs import CopyCurve, CostModel, PrefillCurve
from memserve.protocol.events import MessageArrived
from memserve.protocol.messages import Cancel, Dispatch, Join, RequestRefused, Tokens
from memserve.protocol.peers import Peer, PeerInfo
from memserve.router.events import EmitTokens, InstanceDied, RequestArrived, Send
from memserve.router.machine import Cluster
from memserve.router.placement.stripes import StripeCosts, _equal_ends

GEOMETRY = KVGeometry(32, 8, 128, 128, "bfloat16", 32)
FREE = CopyCurve(0.0, 0.0, 0.0)
COSTS = CostModel(PrefillCurve(NS_PER_MS, 10_000.0, 0.0), same_host=FREE, report_ns=0.0, machine="m")
FAR = replace(COSTS, network=FREE)


def model(link: CopyCurve = FREE, costs: CostModel = COSTS) -> StripeCosts:
    return StripeCosts(costs, link, GEOMETRY.num_layers, GEOMETRY.token_bytes, GEOMETRY.block_tokens)


def test_time_is_shared_but_for_the_first_layers() -> None:
    """16 equal stripes on 4 instances: a quarter of the time, and three layers of one stripe."""
    ends = [1024 * (place + 1) for place in range(16)]
    alone, stripe = model().alone_ns(ends, 0), COSTS.prefill_ns(1024)
    assert alone == 16 * stripe
    assert model().striped_ns(ends, 0, 4) == pytest.approx(alone / 4 + 3 * stripe / GEOMETRY.num_layers, rel=1e-3)
    assert model().striped_ns(ends, 0, 1) == pytest.approx(alone, rel=1e-3)


def test_slow_link_and_reports_are_counted() -> None:
    ends = [1024 * (place + 1) for place in range(16)]
    quick, slow = model().striped_ns(ends, 0, 4), model(CopyCurve(NS_PER_MS, 0.0, 0.0)).striped_ns(ends, 0, 4)
    assert slow > 2 * quick, "each instance pulls 3 stripes of 32 layers for each of its own, four pulls at once"
    reports = replace(COSTS, report_ns=float(NS_PER_MS))
    assert model(costs=reports).striped_ns(ends, 0, 4) > 3 * quick


def test_cached_prefix_is_moved_before_others_begin() -> None:
    link = CopyCurve(0.0, 0.0, 1.0)
    ends = [8192 + 1024 * (place + 1) for place in range(4)]
    with_prefix = model(link).striped_ns(ends, 8192, 4)
    assert with_prefix > link.ns(8192 * GEOMETRY.token_bytes), "whatever they compute then"


def test_instances_that_share_all_cores_gain_nothing() -> None:
    """Two of a host with half of its cores each compute as quickly as one; four take twice as long."""
    ends = [1024 * (place + 1) for place in range(16)]
    alone = model().alone_ns(ends, 0)
    assert model().striped_ns(ends, 0, 4, 4.0) > alone
    for share, count in ((1.0, 1), (0.5, 2), (0.25, 4)):
        members = [member(name, cores_share=share) for name in "abcd"]
        assert len(Router(*members).asked(6 * STEP)) == count
    apart = [member(name, cores_share=1.0, host_id=name) for name in "abcd"]
    assert len(Router(*(structs.replace(info, costs=FAR.to_json()) for info in apart)).asked(6 * STEP)) == 4


def test_stripes_are_equal_whole_blocks() -> None:
    assert _equal_ends(0, 1000, 3, 32) == [352, 704, 1000]
    assert _equal_ends(64, 1000, 3, 32) == [384, 704, 1000]
    assert _equal_ends(0, 96, 3, 32) == [32, 64, 96]
    assert _equal_ends(0, 100, 16, 32) == [32, 64, 96, 100], "there are no more blocks"


# -- the router's machine

STEP = 4 * BLOCK


def member(name: str, **rest: Any) -> PeerInfo:
    more = {"context_tokens": 400, "hbm_blocks": 400, "step_tokens": STEP, "computes_stripes": True}
    more["geometry"] = replace(GEOMETRY, block_tokens=BLOCK)
    return structs.replace(info(name, Role.COLOCATED), **(more | {"costs": COSTS.to_json()} | rest))


class Router:
    """A machine with members, and what it says."""

    def __init__(self, *members: PeerInfo, **config: Any) -> None:
        self.machine, self.now = Cluster(ClusterConfig(**config)), 0
        for one in members:
            self.hears(one.peer.name, Join(one))

    def handle(self, event: Any) -> list[Any]:
        self.now += NS_PER_MS
        actions = self.machine.handle(event, self.now)
        self.machine.check_invariants()
        return actions

    def hears(self, name: str, message: Any) -> list[Any]:
        return self.handle(MessageArrived(Peer(name, 1), message))

    def asked(self, tokens: int, name: str = "r", **more: Any) -> dict[str, Dispatch]:
        prompt = (np.arange(tokens) + sum(map(ord, name))) % 40
        actions = self.handle(RequestArrived(a_request(name, prompt, **more)))
        return dict(told(actions, Dispatch))


def told(actions: list[Any], kind: type) -> list[tuple[str, Any]]:
    return [(a.to.name, a.message) for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def test_all_are_told_at_once_and_the_runner_has_the_last() -> None:
    it = Router(member("a"), member("b"), member("c"))
    orders = it.asked(6 * STEP, max_tokens=5, seed=9)
    assert orders.keys() == {"a", "b", "c"}
    (runner,) = [name for name, order in orders.items() if not order.span.holds]
    stripes = orders[runner].span.stripes
    assert all(order.span.stripes == stripes and not order.span.segments for order in orders.values())
    assert [stripe.tokens for stripe in stripes] == [STEP] * 6 and stripes[-1].peer.name == runner
    owners = [stripe.peer.name for stripe in stripes]
    assert owners[:3] == owners[3:] and len(set(owners)) == 3, "by turns"
    for name, order in orders.items():
        last = max(place for place, owner in enumerate(owners) if owner == name)
        assert len(order.request.prompt) == (last + 1) * STEP, "its prompt ends with the last of its own"
        assert order.request.salt == orders[runner].request.salt, "KV has the names that it has everywhere"
    assert orders[runner].request.stop.max_tokens == 5 and orders[runner].request.sampling.seed == 9


def test_others_are_released_when_the_runner_has_drawn() -> None:
    it = Router(member("a"), member("b"), member("c"))
    orders = it.asked(6 * STEP)
    (runner,) = [name for name, order in orders.items() if not order.span.holds]
    name = orders[runner].request.request_id
    drawn = it.hears(runner, Tokens((TokenOutput(name, 0, (7,)),)))
    assert {to for to, _ in told(drawn, Cancel)} == orders.keys() - {runner}
    helper = next(iter(orders.keys() - {runner}))
    late = TokenOutput(name, 0, (), finish_reason=FinishReason.CANCELLED)
    assert not told(it.hears(helper, Tokens((late,))), Dispatch), "that it was cancelled is no failure"
    it.handle(InstanceDied(helper, "was ended by signal 9"))
    ended = it.hears(runner, Tokens((TokenOutput(name, 0, (8,), finish_reason=FinishReason.STOP, offset=1),)))
    outputs = [o for action in ended if isinstance(action, EmitTokens) for o in action.outputs]
    assert [(o.tokens, o.finish_reason) for o in outputs] == [((8,), FinishReason.STOP)]


@pytest.mark.parametrize("how", ["refused", "died", "failed"])
def test_what_fails_is_tried_again_in_the_ordinary_way(how: str) -> None:
    it = Router(member("a"), member("b"), member("c"))
    orders = it.asked(6 * STEP)
    helper, name = next((to, o.request.request_id) for to, o in orders.items() if o.span.holds)
    if how == "died":
        actions = it.handle(InstanceDied(helper, "was ended by signal 9"))
    elif how == "refused":
        actions = it.hears(helper, RequestRefused(name, "a stripe is lost", 0.0))
    else:
        lost = TokenOutput(name, 0, (), finish_reason=FinishReason.ERROR)
        actions = it.hears(helper, Tokens((lost,)))
    ((_, again),) = told(actions, Dispatch)
    assert again.span is None and len(again.request.prompt) == 6 * STEP and again.request.request_id != name
    assert {to for to, _ in told(actions, Cancel)} >= orders.keys() - {helper}


def test_instances_with_a_prompt_to_compute_take_no_stripes() -> None:
    it = Router(*(member(name) for name in "abcde"), sequence_parallel="2")
    first, second = it.asked(6 * STEP, "r1"), it.asked(6 * STEP, "r2")
    assert len(first) == len(second) == 2 and not first.keys() & second.keys(), "several at once, each its own"
    assert len(it.asked(6 * STEP, "r3")) == 1, "as any other: one instance is left"


@pytest.mark.parametrize(
    "request_more", [{"prompt_logprobs": True}, {"key": "k", "asked": "digest"}, {"nonprefix_reuse": True}]
)
def test_some_prompts_stay_at_one_instance(request_more: dict[str, Any]) -> None:
    assert len(Router(member("a"), member("b")).asked(6 * STEP, **request_more)) == 1


@pytest.mark.parametrize(
    "rest",
    [
        {"computes_stripes": False}, {"costs": b""}, {"step_tokens": 0}, {"hbm_blocks": 5},
        {"costs": replace(COSTS, report_ns=1e9).to_json()},
    ],
)  # fmt: skip
def test_instances_that_cannot_or_need_not_are_left_alone(rest: dict[str, Any]) -> None:
    """Unable, without measured costs, without room, or slower together."""
    assert len(Router(member("a", **rest), member("b", **rest)).asked(6 * STEP)) == 1


def test_short_prompts_and_an_option_leave_them_alone() -> None:
    assert len(Router(member("a"), member("b")).asked(2 * STEP - 1)) == 1
    assert len(Router(member("a"), member("b"), sequence_parallel="off").asked(6 * STEP)) == 1
