"""When a prompt is computed by several instances at once, in stripes, and by which.

::

    instance A   | stripe 0 |         | stripe 4 |  ...
    instance B      | stripe 1 |         | stripe 5 |
    instance C         | stripe 2 |         | stripe 6 |
    runner                | stripe 3 |         | stripe 7 |        has the last one, and decodes

A stripe is what one step computes. It may begin one layer behind the stripe before it, and computes a layer when that
one's has come. So the instances are as busy as one alone would be, for an Nth of the time, plus N - 1 layers at the
beginning. It is done among instances that have no prompts to compute, so that those that wait do not wait longer, and
where that is quicker by a margin: by the costs that the instances have measured, never by assumed ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memserve.base.config import ClusterConfig
from memserve.base.types import Role
from memserve.base.units import NS_PER_MS, ceil_div
from memserve.kv.costs import CopyCurve, CostModel
from memserve.router.members.loads import LoadTable
from memserve.router.members.registry import Member, Registry
from memserve.router.placement.placer import Placement
from memserve.router.requests.requests import Part, Parts, RequestState, RequestTable

MARGIN = 1.25
"""How many times as long one instance must be expected to take."""
PULLS_AT_ONCE = 4
"""While one pull begins, others bring pages (``ExchangeConfig.pulls_in_flight``)."""
INSTANCES_MAX = 16
"""Of one prompt: each of them reads what all others compute."""


class StripeCosts(NamedTuple):
    """What the time of a striped prompt depends on."""

    costs: CostModel
    link: CopyCurve
    """Of pulls from another instance."""
    layers: int
    token_bytes: int
    block_tokens: int

    def alone_ns(self, ends: Sequence[int], cached: int) -> int:
        """Expected time of one instance for stripes that end at ``ends``, behind ``cached`` tokens."""
        return sum([self.costs.prefill_ns(end - first, first) for first, end in _bounds(ends, cached)])

    def striped_ns(self, ends: Sequence[int], cached: int, instances: int, slowness: float = 1.0) -> int:
        """Expected time of ``instances`` that take stripes by turns; one of them has the ``cached`` tokens.
        ``slowness``: how many times as long each of them computes as it does alone."""
        blocks = ceil_div(cached, self.block_tokens)
        cached_ns = self.link.ns(cached * self.token_bytes, blocks)
        free_ns = [cached_ns] * instances  # when each may begin with its next stripe
        start_ns = end_ns = layer_ns = hop_ns = 0
        for place, (first, end) in enumerate(_bounds(ends, cached)):
            alone_ns = self.costs.prefill_ns(end - first, first) + self.layers * self.costs.report_ns
            computed_ns = round(alone_ns * slowness)
            begins_ns = max(free_ns[place % instances], start_ns + layer_ns + hop_ns)
            stripe_bytes, blocks = (end - first) * self.token_bytes, ceil_div(end - first, self.block_tokens)
            pull_ns = self.link.ns(stripe_bytes // self.layers, blocks)
            # what others compute meanwhile has to come in that time, too
            pulls = (instances - 1) * self.layers
            link_ns = self.link.ns((instances - 1) * stripe_bytes, pulls * blocks)
            computed_ns = max(computed_ns, link_ns + round(pulls * self.link.start_ns / PULLS_AT_ONCE))
            ends_ns = max(begins_ns + computed_ns, end_ns + hop_ns + computed_ns // self.layers)
            start_ns, end_ns, layer_ns, hop_ns = begins_ns, ends_ns, computed_ns // self.layers, pull_ns
            free_ns[place % instances] = end_ns
        return end_ns


class StripePlacer:
    """Decides; changes nothing."""

    def __init__(self, config: ClusterConfig, registry: Registry, loads: LoadTable, requests: RequestTable) -> None:
        self._config, self._registry, self._loads, self._requests = config, registry, loads, requests

    def divide_prompt(self, req: RequestState, placement: Placement) -> Placement:
        """``placement``, of one instance, or one of several that compute the prompt of ``req`` at once."""
        runner, prompt = placement.first, len(req.request.prompt)
        cached = placement.route.first.matched_tokens
        step_tokens = runner.info.step_tokens
        if not step_tokens or prompt - cached < 2 * step_tokens or not self._may_divide(req, placement):
            return placement
        helpers = self._helpers(runner, prompt)
        shared = (rival.attempt for rival in self._requests.by_attempt.values() if rival.attempt is not None)
        if not helpers or any(attempt.is_shared and not attempt.striped for attempt in shared):
            return placement
        info = runner.info
        near = bool(info.host_id) and all(helper.info.host_id == info.host_id for helper in helpers)
        geometry, costs = info.geometry, runner.costs
        model = StripeCosts(
            costs, costs.link_curve(near), geometry.num_layers, geometry.token_bytes, geometry.block_tokens
        )
        busy = max(self._loads.work_of(member.number).sequences for member in (runner, *helpers))
        size = (min(m.info.step_tokens for m in (runner, *helpers)) - busy) // geometry.block_tokens
        if size < 1:
            return placement
        return _quickest(model, placement, [runner, *helpers], prompt, cached, size * geometry.block_tokens)

    def _may_divide(self, req: RequestState, placement: Placement) -> bool:
        """What needs all of a prompt at one instance stays there, and so does what was tried before."""
        request = req.request
        plain = not (request.beam_width or request.sampling.prompt_logprobs or request.key or request.nonprefix_reuse)
        alone = placement.decode_at is None and not placement.holders and _computes_stripes(placement.first)
        again = req.past or req.has_begun
        if not (plain and alone) or again or self._config.sequence_instances_max < 2:
            return False
        is_idle = not self._loads.prefill_tokens_of(placement.first.number)
        return is_idle and not self._config.admission.counts_memory

    def _helpers(self, runner: Member, prompt: int) -> list[Member]:
        """Those without a prompt to compute and with room for this one: the least busy ones first."""
        block_tokens, loads = runner.info.geometry.block_tokens, self._loads
        able = [
            member
            for member in self._registry
            if member is not runner and _computes_stripes(member) and not loads.prefill_tokens_of(member.number)
            and member.info.context_tokens > prompt
            and loads.room_tokens_of(member.number, block_tokens) > prompt
        ]  # fmt: skip
        able.sort(key=lambda member: (sum(loads.work_of(member.number)), member.number))
        return able[: min(INSTANCES_MAX, self._config.sequence_instances_max) - 1]


def _computes_stripes(member: Member) -> bool:
    """Whether it may compute stripes, and knows what that costs."""
    info = member.info
    able = info.computes_stripes and info.role is Role.COLOCATED and member.is_open
    return able and member.costs.is_measured


def _quickest(
    model: StripeCosts, placement: Placement, members: Sequence[Member], prompt: int, cached: int, size: int
) -> Placement:
    """Of as many of ``members`` as pays; the first one is to have the last stripe. ``size``: tokens of one, at most."""
    cached = min(cached, prompt - 1) // model.block_tokens * model.block_tokens
    fewest = ceil_div(prompt - cached, size)
    alone_ns = model.alone_ns(_equal_ends(cached, prompt, fewest, model.block_tokens), cached)
    best_ns, best, count = alone_ns, list[int](), 1
    for instances in range(2, min(len(members), fewest) + 1):
        slowness = _slowness(members[:instances])
        for stripes in {fewest, ceil_div(fewest, instances) * instances}:  # of a last turn that all take part in
            ends = _equal_ends(cached, prompt, stripes, model.block_tokens)
            expected_ns = model.striped_ns(ends, cached, instances, slowness)
            if len(ends) >= instances and expected_ns < best_ns:
                best_ns, best, count = expected_ns, ends, instances
    if best_ns * MARGIN > alone_ns:
        return placement
    parts = _parts_of(best, cached, members[:count])
    why = (
        f"{placement.route.reason}; {count} instances compute {len(best)} stripes at once: {best_ns / NS_PER_MS:.0f} ms"
        f" expected, {alone_ns / NS_PER_MS:.0f} ms alone"
    )
    return placement._replace(route=placement.route._replace(reason=why), parts=parts, striped=True)


def _parts_of(ends: Sequence[int], cached: int, members: Sequence[Member]) -> Parts:
    """By turns, so that the first of ``members``, which has what is cached, gets the last one."""
    stripes = _bounds(ends, cached)
    own = [Part(members[(len(ends) - 1 - place) % len(members)], *bounds) for place, bounds in enumerate(stripes)]
    return (Part(members[0], 0, cached), *own) if cached else tuple(own)


def _slowness(members: Sequence[Member]) -> float:
    """How many times as long ``members`` take when all of them compute: those of a host may share its cores."""
    shares: dict[str, float] = {}
    for place, member in enumerate(members):
        host = member.info.host_id or f"unknown {place}"
        shares[host] = shares.get(host, 0.0) + member.info.cores_share
    return max(1.0, *shares.values())


def _equal_ends(first: int, end: int, count: int, block_tokens: int) -> list[int]:
    """``count`` stripes or fewer of ``[first, end)``, whole blocks but for the last."""
    size = ceil_div(ceil_div(end - first, count), block_tokens) * block_tokens
    return [*range(first + size, end, size), end]


def _bounds(ends: Sequence[int], first: int) -> list[tuple[int, int]]:
    return list(zip((first, *ends[:-1]), ends, strict=True))
