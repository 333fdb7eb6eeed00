"""What computing and moving KV costs, learnt while an instance serves: curves through its own steps, copies and pulls.

::

    measured so far            the curve
    nothing                    as it was told: a profile, or what is assumed
    little, or much alike      as it was told, scaled
    five, of different sizes   fitted to the newest
"""

from __future__ import annotations

from collections import deque
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import Generic

from memserve.policy.costs import CopyCurve, CostModel, Curve, PrefillCurve, Row, fit_rows
from memserve.units import GIB, MIB, NS_PER_S

LEARNT = "learnt while serving"
"""The machine of costs that no profile has measured."""
KEPT = 64
"""Measurements of a curve, the newest."""
SAMPLES_MIN = 5
"""Of different sizes, for a fit."""
LINK_SAMPLES_MIN = 3
"""Pulls after which a link is known."""
_SPREAD_MIN = 2.0  # largest to smallest: else sizes are alike, and say nothing of other ones
_FIT_EVERY = 8  # measurements, once there are many
_PEERS_MAX = 1024
_SMOOTHING = 8  # the weight of a new measurement is 1/8
_TYPICAL_TOKENS = 256
_STEP_SHARE_MIN = 8  # prefill tokens per decode row: a step with fewer says little about prefill
_TOLD_AGAIN = 0.1  # the share by which a time must change to be told again


class LearntCurve(Generic[Curve]):
    """One curve, whose three coefficients stand for three features of what is measured."""

    __slots__ = ("_rows", "_times_ns", "_told", "count", "curve", "is_fitted")

    def __init__(self, told: Curve) -> None:
        self._told: Curve = told
        self._rows: deque[Row] = deque(maxlen=KEPT)
        self._times_ns: deque[int] = deque(maxlen=KEPT)
        #: as it is now
        self.curve: Curve = told
        self.is_fitted = False
        #: measurements since the start
        self.count = 0

    def add(self, row: Row, spent_ns: int) -> bool:
        """What ``row`` describes took ``spent_ns``, above 0. Returns whether the curve has changed."""
        self._rows.append(row)
        self._times_ns.append(max(1, spent_ns))
        self.count += 1
        if self.count > 2 * SAMPLES_MIN and self.count % _FIT_EVERY:
            return False
        if len(self._rows) >= SAMPLES_MIN and self._differ():
            self.curve, self.is_fitted = fit_rows(type(self._told), list(self._rows), list(self._times_ns)), True
        elif not self.is_fitted:
            told = [max(1.0, _time_ns(self._told, row)) for row in self._rows]
            scale = median(ns / told_ns for ns, told_ns in zip(self._times_ns, told, strict=True))
            self.curve = type(self._told)(*(value * scale for value in astuple(self._told)))
        return True

    def _differ(self) -> bool:
        sizes = [row[2] or row[1] for row in self._rows]
        return max(sizes) >= _SPREAD_MIN * max(1.0, min(sizes))


def _time_ns(curve: Curve, row: Row) -> float:
    return float(sum(value * part for value, part in zip(astuple(curve), row, strict=True)))


class LearntLinks:
    """The curves of pulls: from each peer, and from all of this host and of others where one is not known yet."""

    __slots__ = ("_kinds", "_peers")

    def __init__(self, same_host: CopyCurve, network: CopyCurve) -> None:
        self._kinds = {True: LearntCurve(same_host), False: LearntCurve(network)}
        self._peers: dict[str, LearntCurve[CopyCurve]] = {}

    def learn(self, peer: str, near: bool, copied_bytes: int, pieces: int, spent_ns: int) -> bool:
        """A pull from ``peer``, over no network if ``near``. Returns whether the curve of its kind has changed."""
        row = (1.0, float(pieces), float(copied_bytes))
        known = self._peers.pop(peer, None)
        known = known if known is not None else LearntCurve(self._kinds[near].curve)
        known.add(row, spent_ns)
        self._peers[peer] = known
        if len(self._peers) > _PEERS_MAX:
            del self._peers[next(iter(self._peers))]
        return self._kinds[near].add(row, spent_ns)

    def curve(self, peer: str, near: bool) -> CopyCurve:
        """What pulls from ``peer`` cost; of a peer that is not known, what they cost from others like it."""
        known = self._peers.get(peer)
        is_known = known is not None and known.count >= LINK_SAMPLES_MIN
        curve: CopyCurve = known.curve if known is not None and is_known else self._kinds[near].curve
        return curve

    def is_known(self, near: bool) -> bool:
        """Whether enough has come from peers of this host, or from others."""
        return self._kinds[near].count >= LINK_SAMPLES_MIN

    def kind(self, near: bool) -> LearntCurve[CopyCurve]:
        """Of all peers of this host, or of others."""
        return self._kinds[near]


# -- sequences that are preempted, and prefixes in DRAM


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Costs that are assumed before anything is measured."""

    block_bytes: int = 1 << 20
    """Bytes of one block over all layers (``KVGeometry.block_bytes``)."""
    link_bytes_per_s: int = 5_000_000_000
    """Rate of copies between the arena and host memory, one way."""
    prefill_ns_per_token: int = 500_000
    """First guess; replaced by measurements as steps finish."""
    profile: CostModel | None = None
    """Measured on this machine: replaces the two rates above."""

    @property
    def model(self) -> CostModel:
        """The profile, else a model from these rates."""
        if self.profile is not None:
            return self.profile
        copy = CopyCurve(0.0, 0.0, NS_PER_S / self.link_bytes_per_s)
        return CostModel(prefill=PrefillCurve(0.0, self.prefill_ns_per_token, 0.0), swap_in=copy, swap_out=copy)


class PreemptionModel:
    """Costs in nanoseconds; learns from finished steps how quickly prompts are computed now."""

    __slots__ = (
        "_block_bytes", "_decode", "_known", "_prefill", "_scale", "_swap", "_told", "decode_ns", "is_measured",
        "links", "model", "samples",
    )  # fmt: skip

    def __init__(self, costs: PreemptionCosts) -> None:
        self._block_bytes = costs.block_bytes
        self._known = costs.model
        #: all costs, prefill at the learned speed
        self.model = costs.model
        self._scale = 1.0
        #: whether a profile was measured; one that was learnt is learnt further
        self.is_measured = costs.profile is not None and costs.profile.machine != LEARNT
        self.samples = int(self.is_measured)
        #: of a step without prefill, lately; 0: none was measured
        self.decode_ns = 0
        self._prefill, self._decode = LearntCurve(self.model.prefill), LearntCurve(self.model.decode)
        self._swap = LearntCurve(self.model.swap_in)
        self.links = LearntLinks(self.model.same_host, self.model.network)
        self._told = b""

    def learn(self, prefill_tokens: int, decode_rows: int, device_ns: int, prefill_pairs: int = 0) -> None:
        """Learn from a finished step if it had no prefill, or was mostly prefill: the time of other steps says little.

        ``prefill_pairs``: see :func:`memserve.policy.costs.attended_pairs`, over all pieces of prompts. The first step
        replaces a guess; later steps, and all steps where there is a profile, have a weight of one eighth.
        """
        if device_ns > 0 and decode_rows and not prefill_tokens:
            before_ns = self.decode_ns or device_ns
            self.decode_ns = before_ns + (device_ns - before_ns) // _SMOOTHING
        if device_ns <= 0 or prefill_tokens < _STEP_SHARE_MIN * (decode_rows + 1):
            return
        tokens = prefill_tokens + decode_rows
        scale = device_ns / max(1, self._known.prefill.step(tokens, prefill_pairs))
        self._scale = scale if self.samples == 0 else self._scale + (scale - self._scale) / _SMOOTHING
        self.samples += 1
        learns = not self.is_measured and self._prefill.add((1.0, tokens, prefill_pairs), device_ns)
        if learns and self._prefill.is_fitted:
            self._known, self._scale = replace(self._known, prefill=self._prefill.curve), 1.0
        self._know()

    def learn_decode(self, rows: int, context_tokens: int, device_ns: int) -> None:
        """A step without prompts computed ``rows`` tokens, which attend to ``context_tokens`` altogether."""
        if not self.is_measured and device_ns > 0 and self._decode.add((1.0, rows, context_tokens), device_ns):
            self._known = replace(self._known, decode=self._decode.curve)
            self._know()

    def learn_swap(self, blocks: int, spent_ns: int) -> None:
        """Copies of ``blocks`` blocks between the tiers, in either direction, took ``spent_ns``."""
        row = (1.0, blocks, blocks * self._block_bytes)
        if blocks and not self.is_measured and spent_ns > 0 and self._swap.add(row, spent_ns):
            self._known = replace(self._known, swap_in=self._swap.curve, swap_out=self._swap.curve)
            self._know()

    def learn_link(self, peer: str, near: bool, copied_bytes: int, pieces: int, spent_ns: int) -> None:
        """A pull of ``copied_bytes`` in ``pieces`` pieces from ``peer``, over no network if ``near``."""
        if copied_bytes > 0 and spent_ns > 0 and self.links.learn(peer, near, copied_bytes, pieces, spent_ns):
            self._know()

    def _know(self) -> None:
        near, far = self.links.kind(near=True).curve, self.links.kind(near=False).curve
        self.model = replace(self._known.scaled(self._scale), same_host=near, network=far)

    @property
    def is_known(self) -> bool:
        """Whether what prompts and answers cost was measured: before, or since the start."""
        return self.is_measured or (self.samples > 0 and self._decode.count > 0)

    @property
    def is_complete(self) -> bool:
        """Whether steps of different sizes have shown what prompts and answers cost: worth keeping."""
        return not self.is_measured and self._prefill.is_fitted and self._decode.is_fitted

    def told(self) -> bytes:
        """The costs for routers, encoded: as they were when they last differed much. Empty: nothing is known yet."""
        if self.is_known and (not self._told or not are_alike(self.model, CostModel.decoded(self._told), _TOLD_AGAIN)):
            self._told = replace(self.model, machine=self.model.machine or LEARNT).encode()
        return self._told

    def step_ns(self, prefill_tokens: int, decode_rows: int, prefill_pairs: int) -> int:
        """Expected time of a step; 0: it has no prefill, or no step with prefill was measured yet."""
        if not (prefill_tokens and self.samples):
            return 0
        return self.model.prefill.step(prefill_tokens + decode_rows, prefill_pairs)

    @property
    def prefill_ns_per_token(self) -> int:
        """Prefill time per token of a prompt of typical length."""
        return max(1, round(self.recompute_ns(_TYPICAL_TOKENS) / _TYPICAL_TOKENS))

    def recompute_ns(self, tokens: int) -> int:
        """Time to run ``tokens`` through the model again."""
        return self.model.prefill_ns(tokens)

    def queue_ns(self, tokens: int) -> int:
        """Time to compute the ``tokens`` of several waiting prompts of typical length."""
        return tokens * self.prefill_ns_per_token

    def swap_ns(self, blocks: int) -> int:
        """Time to copy ``blocks`` out and in again."""
        copy_bytes = blocks * self._block_bytes
        return self._known.swap_out.ns(copy_bytes, blocks) + self._known.swap_in.ns(copy_bytes, blocks)

    def reusable_blocks(self, tokens: int, block_tokens: int, hbm_blocks: int, dram_blocks: int) -> int:
        """Blocks of a cached prefix to reuse for ``tokens`` tokens: those in HBM, and behind them those in DRAM if
        bringing them up is quicker than computing them again.

        Without a profile all of them are reused: only a profile can show that computing is quicker.
        """
        if not (self.is_measured and dram_blocks):
            return hbm_blocks + dram_blocks
        own = min(hbm_blocks * block_tokens, tokens - 1)
        all_of_it = min((hbm_blocks + dram_blocks) * block_tokens, tokens - 1)
        copy_ns = self._known.swap_in.ns(dram_blocks * self._block_bytes, dram_blocks)
        saved_ns = self.model.prefill_ns(tokens - own, own) - self.model.prefill_ns(tokens - all_of_it, all_of_it)
        return hbm_blocks + (dram_blocks if copy_ns <= saved_ns else 0)

    def prefers_swap(self, mode: str, tokens: int, blocks: int) -> bool:
        """Whether to swap: as ``mode`` says, or by cost when it is ``auto``."""
        if mode == "auto":
            return self.swap_ns(blocks) < self.recompute_ns(tokens)
        return mode == "swap"


def are_alike(costs: CostModel, other: CostModel, share: float) -> bool:
    """Whether all of some typical times are equal, but for ``share``."""
    pairs = zip(_typical_ns(costs), _typical_ns(other), strict=True)
    return all(abs(time_ns - other_ns) <= share * max(1, other_ns) for time_ns, other_ns in pairs)


def _typical_ns(costs: CostModel) -> tuple[int, ...]:
    links = costs.swap_in, costs.same_host, costs.network
    copies = [link.ns(copied_bytes, 8) for link in links for copied_bytes in (MIB, GIB)]
    steps = costs.prefill_ns(64), costs.prefill_ns(4096), costs.decode_step_ns(1, 1024), costs.decode_step_ns(32, 65536)
    return (*steps, *copies)
