"""What a profile says, as a plain dictionary: for its file, for ``--json`` and for reports (level 3)."""

from __future__ import annotations

import dataclasses
from typing import Any

from memserve.policy.costs import CostModel
from memserve.policy.decision import Prefix, Way
from memserve.runtime.profile import Profile, crossover_tokens
from memserve.types import KVGeometry

EXAMPLE_TOKENS = 2048
EXAMPLE_CROWD = 32
PREFIX_TOKENS_MAX = 8192
"""Where moving pays is looked for up to here."""


def profile_values(found: Profile, geometry: KVGeometry) -> dict[str, Any]:
    """Everything that was measured, fitted and follows from it."""
    return {
        "machine": found.costs.machine,
        "model": found.costs.model,
        "costs": found.costs.to_dict(),
        "quality": {name: dataclasses.asdict(quality) for name, quality in found.quality.items()},
        "missing": dict(found.measured.missing),
        "pays_from_tokens": pays_from(found.costs, geometry),
        "decisions": _decisions(found.costs, geometry),
        "samples": {
            name: [[sample.first, sample.second, sample.ns] for sample in samples]
            for name, samples in found.measured.samples.items()
        },
    }


def pays_from(costs: CostModel, geometry: KVGeometry) -> dict[str, int | None]:
    """From how many cached tokens on each way of moving them is quicker than computing them again."""
    ways = {
        "swap-in": costs.swap_in_ns,
        "fetch, same host": lambda size, pieces: costs.transfer_ns(size, True, pieces),
        "fetch, network": lambda size, pieces: costs.transfer_ns(size, False, pieces),
    }
    return {way: crossover_tokens(costs, geometry, move_ns, PREFIX_TOKENS_MAX) for way, move_ns in ways.items()}


def _decisions(costs: CostModel, geometry: KVGeometry) -> dict[str, str]:
    """What is decided for a prompt whose first half was computed before, by where that lies."""
    prompt, cached = EXAMPLE_TOKENS, EXAMPLE_TOKENS // 2
    far = Prefix(prompt, remote_tokens=cached, same_host=False)
    alone = {
        "in HBM": Prefix(prompt, hbm_tokens=cached),
        "in DRAM": Prefix(prompt, dram_tokens=cached),
        "on this host": Prefix(prompt, remote_tokens=cached),
        "on another host": far,
    }
    told = {where: costs.decide_batch([prefix], geometry)[0].reason for where, prefix in alone.items()}
    crowd = costs.decide_batch([far] * EXAMPLE_CROWD, geometry)
    fetched = sum(decision.tokens(Way.FETCH) > 0 for decision in crowd)
    told[f"there, {EXAMPLE_CROWD} at once"] = (
        f"{fetched} fetch, {EXAMPLE_CROWD - fetched} recompute: they share the link"
    )
    return told
