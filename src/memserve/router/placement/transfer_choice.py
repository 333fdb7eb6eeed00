"""Which way a prompt's KV takes from prefill to decode: ``--transfer auto`` decides for each request.

What counts is the time *behind* the prefill, in which the request waits for KV (MemServe 5.2)::

    prefill          | layer 1 | layer 2 | layer 3 |
    by-layer                   |=1=|     |=2=|     |=3=|            a message and a pull for each layer
    by-request                                     |= 1 2 3 =|      one pull, in a piece for each page
    by-request-agg                                 |=====|          one pull, in whole blocks
                                                   behind -->

A prompt of several steps is pulled step by step, short ones that share a step are pulled together, and what the prefill
instance has cached is pulled meanwhile. Each layer that is reported makes the step longer (``CostModel.report_ns``),
for this prompt and for those that wait behind it; and where the link carries less than the instance computes, or its
checksums take longer, each of them waits for those before it. How many wait behind is not known: as many as wait
before, as many again that come while those are computed, and again while these are. All rates are those that the
instances have measured.
"""

from __future__ import annotations

from typing import NamedTuple

from memserve.base.types import TransferMode
from memserve.base.units import NS_PER_MS, ceil_div
from memserve.kv.costs import CopyCurve
from memserve.router.placement.candidates import Ask, Candidate, TransferChoice
from memserve.router.placement.routing import first_cost, link_between

_PREFERRED = (TransferMode.BY_REQUEST_AGG, TransferMode.BY_LAYER, TransferMode.BY_REQUEST)
"""The first of those that cost alike: the fewest messages, then the earliest pages."""
_ALIKE = 0.02
"""Of the prefill: what saves less is within what estimates err by, and costs messages."""


class PlannedHandoff(NamedTuple):
    """What the time of a handoff depends on."""

    prefill_ns: int
    """Of computing the prompt, or the rest of it."""
    steps: int
    """In which it is computed."""
    cached_blocks: int
    """Blocks that the decode instance lacks, and the prefill instance need not compute."""
    computed_blocks: int
    """Blocks that it lacks, and that are computed."""
    queued_prompts: float
    """Prompts that wait before this one."""
    together: int
    """Prompts that a step computes, this one among them: they are handed over at the same time."""
    layers: int
    block_bytes: int
    link: CopyCurve
    """Of pulls by the decode instance."""
    report_ns: float
    """By how much a step is longer for each layer that it reports."""
    seal_byte_ns: float = 0.0
    """Of ``link``, what the prefill instance takes for checksums: of the next pages while others are copied."""


def expected_ns(handoff: PlannedHandoff, mode: TransferMode) -> int:
    """What the request waits for KV behind its prefill, and by how much the prefill is longer, for all that wait."""
    by_layer = mode is TransferMode.BY_LAYER
    block_pieces = 1 if mode is TransferMode.BY_REQUEST_AGG else handoff.layers
    reports_ns = handoff.steps * handoff.layers * handoff.report_ns if by_layer else 0.0
    computed_ns = handoff.together * handoff.prefill_ns + reports_ns
    pulls = handoff.steps * handoff.layers if by_layer else handoff.steps
    blocks, layers = ceil_div(handoff.computed_blocks, handoff.steps), handoff.layers if by_layer else 1
    seal_ns, copy_ns = _stages_ns(handoff, blocks * handoff.block_bytes // layers, blocks * block_pieces // layers)
    cached_seal_ns, cached_copy_ns = _stages_ns(
        handoff, handoff.cached_blocks * handoff.block_bytes, handoff.cached_blocks * block_pieces
    )
    # sealed one after the other, each copied when it is sealed and the one before it is here: what takes longest of all
    # ways through the two, from the begin or the first layer or step on, or only the last one
    sealed_ns, copied_ns = pulls * seal_ns, pulls * copy_ns
    from_first_ns = max(seal_ns + copied_ns, sealed_ns + copy_ns)
    behind_ns = max(
        seal_ns + copy_ns,
        computed_ns / pulls + from_first_ns - computed_ns,
        cached_seal_ns + max(cached_copy_ns + copied_ns, from_first_ns) - computed_ns,
    )
    behind_ns -= (seal_ns + copy_ns) * (1 - 1 / handoff.together) / 2  # on average, half of the others come later
    late_ns = max(cached_seal_ns + sealed_ns, cached_copy_ns + copied_ns) - computed_ns
    waits_ns = reports_ns + max(0.0, late_ns) / handoff.together
    return round(behind_ns + reports_ns + 3 * handoff.queued_prompts * waits_ns)


def _stages_ns(handoff: PlannedHandoff, copied_bytes: int, pieces: int) -> tuple[float, float]:
    """What the prefill instance takes for checksums of so many bytes, and the rest of what moving them takes; of all
    prompts together."""
    moved_ns = handoff.link.ns(copied_bytes, pieces)
    sealed_ns = min(float(moved_ns), copied_bytes * handoff.seal_byte_ns)
    return handoff.together * sealed_ns, handoff.together * (moved_ns - sealed_ns)


def choose_transfer(handoff: PlannedHandoff, *, reports_layers: bool) -> TransferChoice:
    """The quickest mode. ``reports_layers``: whether the prefill instance can hand over layer by layer."""
    able = [mode for mode in _PREFERRED if reports_layers or mode is not TransferMode.BY_LAYER]
    waits_ns = {mode: expected_ns(handoff, mode) for mode in able}
    margin_ns = _ALIKE * handoff.prefill_ns
    best = min(able, key=waits_ns.__getitem__)
    mode = best if waits_ns[able[0]] - waits_ns[best] > margin_ns else able[0]
    listed = ", ".join(f"{name} {ns / NS_PER_MS:.1f}" for name, ns in waits_ns.items())
    unable = "" if reports_layers else "; by-layer cannot be: the instance does not report layers"
    around = f"prefill {handoff.prefill_ns / NS_PER_MS:.1f}, {handoff.queued_prompts:.1f} prompts wait"
    return TransferChoice(mode, f"auto: expected ms behind the prefill: {listed} ({around}){unable}")


def handoff_of(ask: Ask, first: Candidate, decoder: Candidate, layers: int, step_tokens: int) -> PlannedHandoff:
    """The handoff of a prompt that ``first`` computes, in steps of ``step_tokens`` (0: not known), for ``decoder``."""
    cost = first_cost(ask, first)
    new_tokens = max(1, ask.prompt_tokens - cost.reused_tokens)
    block_tokens = ask.block_tokens
    end, decoder_blocks = ceil_div(ask.prompt_tokens, block_tokens), decoder.matched_tokens // block_tokens
    reused_blocks, queued_prompts = cost.reused_tokens // block_tokens, first.prefill_tokens / ask.prompt_tokens
    return PlannedHandoff(
        cost.prefill_ns,
        ceil_div(new_tokens, step_tokens) if step_tokens else 1,
        max(0, reused_blocks - decoder_blocks),
        max(0, end - max(reused_blocks, decoder_blocks)) + ask.state_blocks,
        queued_prompts,
        min(1 + int(queued_prompts / 2), max(1, step_tokens // new_tokens)),  # the others are in the step under way
        layers,
        block_tokens * ask.token_bytes,
        link_between(first, decoder),
        first.costs.report_ns,
        first.costs.seal_byte_ns,
    )
