"""What computing and moving KV cost on one machine: the curves, the fit to measurements, and the model of an instance.

::

    prefill   step + token * new + pair * (pairs of query and key)     LayerKV, equation 3: the quadratic part
    decode    step + row * batch + context * (tokens attended to)
    copy      start + piece * pieces + byte * bytes                    discrete and aggregated differ in pieces only

Each coefficient has a meaning, and none is negative (MemServe 5.3 and figure 13). ``memserve profile`` measures them.
The defaults take computing to be quick and moving to be slow: without a profile only what clearly pays is moved.

What computing and moving KV costs, learnt while an instance serves: curves through its own steps, copies and pulls.

::

    measured so far            the curve
    nothing                    as it was told: a profile, or what is assumed
    little, or much alike      as it was told, scaled
    five, of different sizes   fitted to the newest
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from memserve import _core
from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.base.units import GIB, MIB, NS_PER_MS, NS_PER_S, ceil_div

VERSION = 1
"""Of the dictionary form."""

_NS_MAX = 1e15
"""No measured coefficient exceeds 11 days; the limit keeps sums finite."""


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Time to compute a prompt, or the rest of one."""

    step_ns: float = 2.0 * NS_PER_MS
    """The fixed time of a step: reading the weights once."""
    token_ns: float = 200_000.0
    """For each new token: the linear layers."""
    pair_ns: float = 10.0
    """For each pair of a new token and one that it attends to, over all layers and heads."""

    def ns(self, new_tokens: int, context_tokens: int) -> int:
        """Time to compute ``new_tokens`` behind ``context_tokens`` whose KV is present."""
        return self.batch_ns(new_tokens, attended_pairs(new_tokens, context_tokens))

    def batch_ns(self, new_tokens: int, pairs: int) -> int:
        """Time of one step over pieces of several prompts: ``new_tokens`` and their ``pairs``, summed over the
        pieces."""
        return round(self.step_ns + self.work_ns(new_tokens, pairs)) if new_tokens > 0 else 0

    def work_ns(self, new_tokens: int, pairs: int) -> float:
        """Of that, what grows with the tokens."""
        return self.token_ns * new_tokens + self.pair_ns * pairs


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Time of one step that gives each sequence of a batch its next token."""

    step_ns: float = 10.0 * NS_PER_MS
    row_ns: float = 200_000.0
    """For each sequence of the batch."""
    context_ns: float = 30.0
    """For each token attended to, summed over the batch: its KV is read."""

    def ns(self, batch: int, context_tokens: int) -> int:
        """Time of a step of ``batch`` sequences with ``context_tokens`` altogether."""
        return round(self.step_ns + self.row_ns * batch + self.context_ns * context_tokens) if batch > 0 else 0


@dataclass(frozen=True, slots=True)
class CopyCurve:
    """Time to move bytes over one link, in contiguous pieces."""

    start_ns: float
    piece_ns: float
    byte_ns: float

    def ns(self, copy_bytes: int, pieces: int = 1) -> int:
        """Time to move ``copy_bytes`` altogether, in ``pieces`` pieces."""
        return round(self.start_ns + self.piece_ns * pieces + self.byte_ns * copy_bytes) if copy_bytes > 0 else 0

    def bytes_s(self, piece_bytes: int) -> float:
        """Bytes a second of a long copy in pieces of ``piece_bytes``."""
        return NS_PER_S / max(self.byte_ns + self.piece_ns / piece_bytes, 1e-3)

    def kv_ns(self, tokens: int, block_tokens: int, token_bytes: int, block_pieces: int = 1) -> int:
        """Time to move the KV of ``tokens`` tokens, in whole blocks of ``block_pieces`` pieces: 1 when a block is moved
        as one piece, the number of layers when it is moved page by page.

        The price of every swap and every transfer, at the router and at the instances; ``_core.cheapest`` repeats it.
        """
        blocks = ceil_div(tokens, block_tokens)
        return self.ns(blocks * block_tokens * token_bytes, blocks * block_pieces)


_NO_LINK = CopyCurve(_NS_MAX, 0.0, 0.0)


def attended_pairs(new_tokens: int, context_tokens: int) -> int:
    """Pairs of query and key when ``new_tokens`` attend to ``context_tokens`` before them and, causally, to each
    other."""
    return new_tokens * context_tokens + new_tokens * (new_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class CostModel:
    """Expected times of one instance in nanoseconds: never negative, and never less for more work."""

    prefill: PrefillCurve = field(default_factory=PrefillCurve)
    decode: DecodeCurve = field(default_factory=DecodeCurve)
    swap_in: CopyCurve = field(default_factory=lambda: CopyCurve(100_000.0, 5_000.0, 0.2))
    """Host memory to the arena that attention reads (0.2 ns a byte = 5 GB/s)."""
    swap_out: CopyCurve = field(default_factory=lambda: CopyCurve(100_000.0, 5_000.0, 0.2))
    same_host: CopyCurve = field(default_factory=lambda: CopyCurve(2.0 * NS_PER_MS, 10_000.0, 0.25))
    """From another process's shared memory, messages included."""
    network: CopyCurve = field(default_factory=lambda: CopyCurve(10.0 * NS_PER_MS, 30_000.0, 2.0))
    """From another host (2 ns a byte = 0.5 GB/s)."""
    disk: CopyCurve = field(default_factory=lambda: CopyCurve(2.0 * NS_PER_MS, 100_000.0, 2.0))
    """Of a store: from its disks into its memory, checked; the link comes on top (2 ns a byte = 0.5 GB/s)."""
    report_ns: float = 100_000.0
    """For each layer of a step that is handed over while the next is computed: by how much the step is longer."""
    seal_byte_ns: float = 0.0
    """Checksums of KV that other instances pull, a part of what their links take. 0: not measured."""
    machine: str = ""
    """Where it was measured; empty: these are the defaults."""
    model: str = ""
    """With which model, dtype, device and threads."""

    @property
    def is_measured(self) -> bool:
        """Whether the costs come from a profile."""
        return bool(self.machine)

    def link_curve(self, same_host: bool) -> CopyCurve:
        """The curve of transfers from another instance to this one."""
        return self.same_host if same_host else self.network

    def prefill_ns(self, new_tokens: int, context_tokens: int = 0) -> int:
        """Time to compute ``new_tokens`` behind ``context_tokens`` whose KV is present."""
        return self.prefill.ns(new_tokens, context_tokens)

    def decode_step_ns(self, batch: int, context_tokens: int) -> int:
        """Time of one step of ``batch`` sequences that attend to ``context_tokens`` tokens altogether."""
        return self.decode.ns(batch, context_tokens)

    @property
    def free_tokens(self) -> int:
        """Tokens of a prompt that a step of decodes is expected to compute in no more time: while it reads the weights
        for a few rows, it has arithmetic to spare."""
        return int(max(0.0, self.decode.step_ns - self.prefill.step_ns) / max(1.0, self.prefill.token_ns))

    def without_links(self) -> CostModel:
        """These costs where no KV can come from elsewhere: to compute it is always quicker."""
        return replace(self, same_host=_NO_LINK, network=_NO_LINK)

    def with_prefill_scale(self, prefill_scale: float) -> CostModel:
        """These costs with prefill times scaled, as learned from finished steps."""
        old = self.prefill
        scaled = (old.step_ns * prefill_scale, old.token_ns * prefill_scale, old.pair_ns * prefill_scale)
        return replace(self, prefill=PrefillCurve(*scaled))

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary for JSON."""
        return {"version": VERSION, **asdict(self)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> CostModel:
        """The reverse of :meth:`to_dict`. Raises :class:`UserError` for another version, or malformed values."""
        if values.get("version") != VERSION:
            raise UserError(f"a cost profile of version {values.get('version')!r}", hint="run: memserve profile")
        try:
            model = msgspec.convert({k: v for k, v in values.items() if k != "version"}, CostModel)
        except msgspec.ValidationError as error:
            raise UserError(f"not a cost profile: {error}", hint="run: memserve profile") from None
        links = (model.swap_in, model.swap_out, model.same_host, model.network, model.disk)
        curves = (model.prefill, model.decode, *links)
        times_ns = [
            model.report_ns,
            model.seal_byte_ns,
            *(getattr(curve, name) for curve in curves for name in curve.__slots__),
        ]
        if not all(0 <= time_ns <= _NS_MAX for time_ns in times_ns):
            raise UserError("a cost profile with impossible times", hint="run: memserve profile")
        return model

    def to_json(self) -> bytes:
        """As JSON, for other processes."""
        return msgspec.json.encode(self.to_dict())

    @staticmethod
    def from_json(data: bytes) -> CostModel:
        """The reverse of :meth:`to_json`. Raises :class:`UserError` as :meth:`from_dict`."""
        try:
            values = msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise UserError(f"not a cost profile: {error}", hint="run: memserve profile") from None
        return CostModel.from_dict(values)


# -- from measurements to curves

Curve = TypeVar("Curve", PrefillCurve, DecodeCurve, CopyCurve)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: the two arguments of a curve's ``ns``, and the time that it really took.

    Prefill: new tokens, cached tokens. Decode: batch, tokens attended to. Copies: bytes, pieces.
    """

    first: int
    second: int
    ns: int


@dataclass(frozen=True, slots=True)
class Quality:
    """How well a curve predicts samples that it was not fitted to: relative errors, 0.1 = 10 %."""

    samples: int
    median_error: float
    worst_error: float


def fit_prefill(samples: Sequence[Sample]) -> PrefillCurve:
    """From samples of (new tokens, cached tokens). Raises :class:`UserError` for fewer than three."""
    rows = [(1, sample.first, attended_pairs(sample.first, sample.second)) for sample in samples]
    return fit_rows(PrefillCurve, rows, [sample.ns for sample in samples])


def fit_decode(samples: Sequence[Sample]) -> DecodeCurve:
    """From samples of (batch, tokens attended to). Raises :class:`UserError` for fewer than three."""
    rows = [(1, sample.first, sample.second) for sample in samples]
    return fit_rows(DecodeCurve, rows, [sample.ns for sample in samples])


def fit_copy(samples: Sequence[Sample]) -> CopyCurve:
    """From samples of (bytes, pieces). Raises :class:`UserError` for fewer than three."""
    rows = [(1, sample.second, sample.first) for sample in samples]
    return fit_rows(CopyCurve, rows, [sample.ns for sample in samples])


Row = tuple[float, float, float]
"""What a time is made of: what the coefficients of a curve are multiplied with."""


def fit_rows(kind: type[Curve], rows: Sequence[Row], times_ns: Sequence[int]) -> Curve:
    """The curve of ``kind`` through ``times_ns``. Raises :class:`UserError` for fewer than three.

    Least squares of the relative error: a prompt of 100 tokens is estimated as well as one of 8,000. Outliers weigh
    less (Huber): one slow moment of the machine must not distort the curve. If all pieces of copies have one size,
    bytes and pieces cannot be told apart: then bytes carry all of the cost.
    """
    if len(times_ns) < 3 or min(times_ns) <= 0:
        raise UserError(f"{len(times_ns)} samples make no curve", hint="measure at least three, all above zero")
    features = np.array(rows, dtype=np.float64)
    if kind is CopyCurve and len({row[2] / max(1.0, row[1]) for row in rows}) == 1:
        features[:, 1] = 0.0
    return kind(*_core.fit_curve(features, np.array(times_ns, dtype=np.float64)))


def fit_held_out(samples: Sequence[Sample], fit: Callable[[Sequence[Sample]], Curve]) -> tuple[Curve, Quality]:
    """The curve through all samples, and how well one through two thirds of them predicts the rest.

    A third of the samples is left out, three times over, so that each is predicted once by a curve that has not seen
    it. The thirds run diagonally through a grid of any width, so that none of them is a whole row or column.
    """
    ordered = sorted(samples, key=lambda sample: (sample.first, sample.second))
    errors: list[float] = []
    for turn in range(3):
        curve = fit([sample for index, sample in enumerate(ordered) if (index + index // 3) % 3 != turn])
        unseen = [sample for index, sample in enumerate(ordered) if (index + index // 3) % 3 == turn]
        errors += [abs(curve.ns(sample.first, sample.second) - sample.ns) / sample.ns for sample in unseen]
    return fit(ordered), Quality(len(errors), median(errors), max(errors))


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
_TYPICAL_TOKENS, _TYPICAL_LAYERS = 256, 32
_STEP_SHARE_MIN = 8  # prefill tokens per decode row: a step with fewer says little about prefill
_TOLD_AGAIN = 0.1  # the share by which a time must change to be told again


class LearntCurve(Generic[Curve]):
    """One curve, whose three coefficients stand for three features of what is measured."""

    __slots__ = ("_prior", "_rows", "_times_ns", "count", "curve", "is_fitted")

    def __init__(self, prior: Curve) -> None:
        self._prior: Curve = prior
        self._rows: deque[Row] = deque(maxlen=KEPT)
        self._times_ns: deque[int] = deque(maxlen=KEPT)
        #: as it is now
        self.curve: Curve = prior
        self.is_fitted = False
        #: measurements since the start
        self.count = 0

    def add_sample(self, row: Row, spent_ns: int) -> bool:
        """What ``row`` describes took ``spent_ns``, above 0. Returns whether the curve has changed."""
        self._rows.append(row)
        self._times_ns.append(max(1, spent_ns))
        self.count += 1
        if self.count > 2 * SAMPLES_MIN and self.count % _FIT_EVERY:
            return False
        if len(self._rows) >= SAMPLES_MIN and self._sizes_differ():
            self.curve, self.is_fitted = fit_rows(type(self._prior), list(self._rows), list(self._times_ns)), True
        elif not self.is_fitted:
            prior_ns = [max(1.0, _time_ns(self._prior, row)) for row in self._rows]
            scale = median(ns / told_ns for ns, told_ns in zip(self._times_ns, prior_ns, strict=True))
            self.curve = type(self._prior)(*(value * scale for value in _values_of(self._prior)))
        return True

    def _sizes_differ(self) -> bool:
        sizes = [row[2] or row[1] for row in self._rows]
        return max(sizes) >= _SPREAD_MIN * max(1.0, min(sizes))


def _time_ns(curve: Curve, row: Row) -> float:
    first, second, third = _values_of(curve)
    return float(first * row[0] + second * row[1] + third * row[2])


def _values_of(curve: Curve) -> tuple[float, float, float]:
    """As ``dataclasses.astuple``, which copies deeply."""
    first, second, third = (getattr(curve, name) for name in curve.__slots__)
    return first, second, third


class LearntLinks:
    """The curves of pulls: from each peer, and from all of this host and of others where one is not known yet."""

    def __init__(self, same_host: CopyCurve, network: CopyCurve) -> None:
        self._kinds = {True: LearntCurve(same_host), False: LearntCurve(network)}
        self._peers: dict[str, LearntCurve[CopyCurve]] = {}

    def learn_pull(self, peer: str, near: bool, copied_bytes: int, pieces: int, spent_ns: int) -> bool:
        """A pull from ``peer``, over no network if ``near``. Returns whether the curve of its kind has changed."""
        row = (1.0, float(pieces), float(copied_bytes))
        link = self._peers.pop(peer, None)
        link = link if link is not None else LearntCurve(self._kinds[near].curve)
        link.add_sample(row, spent_ns)
        self._peers[peer] = link
        if len(self._peers) > _PEERS_MAX:
            del self._peers[next(iter(self._peers))]
        return self._kinds[near].add_sample(row, spent_ns)

    def curve_from(self, peer: str, near: bool) -> CopyCurve:
        """What pulls from ``peer`` cost; of a peer that is not known, what they cost from others like it."""
        link = self._peers.get(peer)
        is_known = link is not None and link.count >= LINK_SAMPLES_MIN
        curve: CopyCurve = link.curve if link is not None and is_known else self._kinds[near].curve
        return curve

    def is_known(self, near: bool) -> bool:
        """Whether enough has come from peers of this host, or from others."""
        return self._kinds[near].count >= LINK_SAMPLES_MIN

    def curve_of_kind(self, near: bool) -> LearntCurve[CopyCurve]:
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
        self._reports: deque[float] = deque(maxlen=KEPT)
        self._encoded_costs = b""
        self._encoded_model: CostModel | None = None  # that it encodes
        self._compared_model: CostModel | None = None  # with that, last

    def learn_step(
        self, prefill_tokens: int, decode_rows: int, device_ns: int, prefill_pairs: int = 0, reported_layers: int = 0
    ) -> None:
        """Learn from a finished step if it had no prefill, or was mostly prefill: the time of other steps says little.

        ``prefill_pairs``: see :func:`memserve.kv.costs.attended_pairs`, over all pieces of prompts. The first step
        replaces a guess; later steps, and all steps where there is a profile, have a weight of one eighth. What a step
        with ``reported_layers`` took longer than others is what they cost.
        """
        if device_ns > 0 and decode_rows and not prefill_tokens:
            before_ns = self.decode_ns or device_ns
            self.decode_ns = before_ns + (device_ns - before_ns) // _SMOOTHING
        if device_ns <= 0 or prefill_tokens < _STEP_SHARE_MIN * (decode_rows + 1):
            return
        tokens = prefill_tokens + decode_rows
        if reported_layers:
            self._learn_report(reported_layers, device_ns - self.model.prefill.batch_ns(tokens, prefill_pairs))
            device_ns = max(1, device_ns - round(reported_layers * self._known.report_ns))
        scale = device_ns / max(1, self._known.prefill.batch_ns(tokens, prefill_pairs))
        self._scale = scale if self.samples == 0 else self._scale + (scale - self._scale) / _SMOOTHING
        self.samples += 1
        learns = not self.is_measured and self._prefill.add_sample((1.0, tokens, prefill_pairs), device_ns)
        if learns and self._prefill.is_fitted:
            self._known, self._scale = replace(self._known, prefill=self._prefill.curve), 1.0
        self._update_model()

    def _learn_report(self, layers: int, longer_ns: int) -> None:
        """A step that has reported ``layers`` layers was ``longer_ns`` longer than is expected of one that does not."""
        if self.samples:  # else nothing is expected
            self._reports.append(longer_ns / layers)
        if len(self._reports) >= SAMPLES_MIN:  # the median: single steps are longer for other reasons
            self._known = replace(self._known, report_ns=max(0.0, median(self._reports)))

    def learn_seal(self, sealed_bytes: int, spent_ns: int) -> None:
        """Checksums of ``sealed_bytes`` took ``spent_ns``."""
        if sealed_bytes > 0 and spent_ns > 0:
            byte_ns, before_ns = spent_ns / sealed_bytes, self._known.seal_byte_ns
            smoothed_ns = before_ns + (byte_ns - before_ns) / _SMOOTHING if before_ns else byte_ns
            self._known = replace(self._known, seal_byte_ns=smoothed_ns)
            self._update_model()

    def learn_decode(self, rows: int, context_tokens: int, device_ns: int) -> None:
        """A step without prompts computed ``rows`` tokens, which attend to ``context_tokens`` altogether."""
        if not self.is_measured and device_ns > 0 and self._decode.add_sample((1.0, rows, context_tokens), device_ns):
            self._known = replace(self._known, decode=self._decode.curve)
            self._update_model()

    def learn_swap(self, blocks: int, spent_ns: int) -> None:
        """Copies of ``blocks`` blocks between the tiers, in either direction, took ``spent_ns``."""
        row = (1.0, blocks, blocks * self._block_bytes)
        if blocks and not self.is_measured and spent_ns > 0 and self._swap.add_sample(row, spent_ns):
            self._known = replace(self._known, swap_in=self._swap.curve, swap_out=self._swap.curve)
            self._update_model()

    def learn_link(self, peer: str, near: bool, copied_bytes: int, pieces: int, spent_ns: int) -> None:
        """A pull of ``copied_bytes`` in ``pieces`` pieces from ``peer``, over no network if ``near``. ``spent_ns``:
        with what ``peer`` took for the checksums, as in a profile."""
        if copied_bytes > 0 and spent_ns > 0 and self.links.learn_pull(peer, near, copied_bytes, pieces, spent_ns):
            self._update_model()

    def _update_model(self) -> None:
        near, far = self.links.curve_of_kind(near=True).curve, self.links.curve_of_kind(near=False).curve
        self.model = replace(self._known.with_prefill_scale(self._scale), same_host=near, network=far)

    def is_known(self, role: Role = Role.COLOCATED) -> bool:
        """Whether what an instance of ``role`` computes was measured: before, or since the start."""
        knows_prompts = self.samples > 0 or role is Role.DECODE
        knows_answers = self._decode.count > 0 or role is Role.PREFILL
        return self.is_measured or (knows_prompts and knows_answers)

    @property
    def is_complete(self) -> bool:
        """Whether steps of different sizes have shown what prompts and answers cost: worth keeping."""
        return not self.is_measured and self._prefill.is_fitted and self._decode.is_fitted

    def encoded_costs(self, role: Role = Role.COLOCATED) -> bytes:
        """The costs for routers, encoded: as they were when they last differed much. Empty: nothing is known yet of
        what an instance of ``role`` computes."""
        if self._compared_model is not self.model and self.is_known(role):
            self._compared_model = self.model
            if self._encoded_model is None or not are_alike(self.model, self._encoded_model, _TOLD_AGAIN):
                self._encoded_model = replace(self.model, machine=self.model.machine or LEARNT)
                self._encoded_costs = self._encoded_model.to_json()
        return self._encoded_costs

    def step_ns(self, prefill_tokens: int, decode_rows: int, prefill_pairs: int) -> int:
        """Expected time of a step; 0: it has no prefill, or no step with prefill was measured yet."""
        if not (prefill_tokens and self.samples):
            return 0
        return self.model.prefill.batch_ns(prefill_tokens + decode_rows, prefill_pairs)

    @property
    def prefill_ns_per_token(self) -> int:
        """Prefill time per token of a prompt of typical length."""
        return max(1, round(self.recompute_ns(_TYPICAL_TOKENS) / _TYPICAL_TOKENS))

    def saved_ns(self, tokens: int, behind: int) -> int:
        """By how much steps that compute prompts are shorter without ``tokens`` tokens behind ``behind`` others."""
        prefill = self.model.prefill
        return max(0, prefill.ns(tokens, behind) - round(prefill.step_ns))

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
        hbm_tokens = min(hbm_blocks * block_tokens, tokens - 1)
        all_of_it = min((hbm_blocks + dram_blocks) * block_tokens, tokens - 1)
        copy_ns = self._known.swap_in.ns(dram_blocks * self._block_bytes, dram_blocks)
        saved_ns = self.model.prefill_ns(tokens - hbm_tokens, hbm_tokens) - self.model.prefill_ns(
            tokens - all_of_it, all_of_it
        )
        return hbm_blocks + (dram_blocks if copy_ns <= saved_ns else 0)

    def prefers_swap(self, mode: str, tokens: int, blocks: int) -> bool:
        """Whether to swap: as ``mode`` says, or by cost when it is ``auto``."""
        if mode == "auto":
            return self.swap_ns(blocks) < self.recompute_ns(tokens)
        return mode == "swap"


def are_alike(costs: CostModel, other_costs: CostModel, share: float) -> bool:
    """Whether all of some typical times are equal, but for ``share``."""
    pairs = zip(_typical_ns(costs), _typical_ns(other_costs), strict=True)
    return all(abs(time_ns - other_ns) <= share * max(1, other_ns) for time_ns, other_ns in pairs)


def _typical_ns(costs: CostModel) -> tuple[int, ...]:
    links = costs.swap_in, costs.same_host, costs.network
    reports_ns = round(_TYPICAL_LAYERS * costs.report_ns) + costs.prefill_ns(_TYPICAL_TOKENS)
    copies = [link.ns(copied_bytes, 8) for link in links for copied_bytes in (MIB, GIB)]
    copies.append(round(GIB * costs.seal_byte_ns))
    steps = costs.prefill_ns(64), costs.prefill_ns(4096), costs.decode_step_ns(1, 1024), costs.decode_step_ns(32, 65536)
    return (*steps, *copies, reports_ns)
