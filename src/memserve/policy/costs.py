"""What computing and moving KV cost on one machine: the curves, the fit to measurements, and the model of an instance.

::

    prefill   step + token * new + pair * (pairs of query and key)     LayerKV, equation 3: the quadratic part
    decode    step + row * batch + context * (tokens attended to)
    copy      start + piece * pieces + byte * bytes                    discrete and aggregated differ in pieces only

Each coefficient has a meaning, and none is negative (MemServe 5.3 and figure 13). ``memserve profile`` measures them.
The defaults take computing to be quick and moving to be slow: without a profile only what clearly pays is moved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from memserve.errors import UserError
from memserve.units import NS_PER_MS, NS_PER_S, ceil_div

VERSION = 1
"""Of the dictionary form."""

_NS_MAX = 1e15
"""No measured coefficient exceeds 11 days; the limit keeps sums finite."""
_REFITS = 8
_FAR = 1.5
"""Errors beyond this multiple of the median error weigh less in a fit."""
_ERROR_MIN = 0.005


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
        return self.step(new_tokens, attended_pairs(new_tokens, context_tokens))

    def step(self, new_tokens: int, pairs: int) -> int:
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
    machine: str = ""
    """Where it was measured; empty: these are the defaults."""
    model: str = ""
    """With which model, dtype, device and threads."""

    @property
    def is_measured(self) -> bool:
        """Whether the costs come from a profile."""
        return bool(self.machine)

    def link(self, same_host: bool) -> CopyCurve:
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

    def scaled(self, prefill_scale: float) -> CostModel:
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
        if not all(0 <= value <= _NS_MAX for curve in curves for value in asdict(curve).values()):
            raise UserError("a cost profile with impossible times", hint="run: memserve profile")
        return model

    def encode(self) -> bytes:
        """As JSON, for other processes."""
        return msgspec.json.encode(self.to_dict())

    @staticmethod
    def decoded(data: bytes) -> CostModel:
        """The reverse of :meth:`encode`. Raises :class:`UserError` as :meth:`from_dict`."""
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
    return PrefillCurve(*_coefficients(rows, samples))


def fit_decode(samples: Sequence[Sample]) -> DecodeCurve:
    """From samples of (batch, tokens attended to). Raises :class:`UserError` for fewer than three."""
    return DecodeCurve(*_coefficients([(1, sample.first, sample.second) for sample in samples], samples))


def fit_copy(samples: Sequence[Sample]) -> CopyCurve:
    """From samples of (bytes, pieces). Raises :class:`UserError` for fewer than three.

    If all pieces have one size, bytes and pieces cannot be told apart: then bytes carry all of the cost.
    """
    one_size = len({sample.first * samples[0].second - samples[0].first * sample.second for sample in samples}) == 1
    rows = [(1, 0 if one_size else sample.second, sample.first) for sample in samples]
    return CopyCurve(*_coefficients(rows, samples))


Row = tuple[float, float, float]
"""What a time is made of: what the coefficients of a curve are multiplied with."""


def fit_rows(kind: type[Curve], rows: Sequence[Row], times_ns: Sequence[int]) -> Curve:
    """The curve of ``kind`` through ``times_ns``. Raises :class:`UserError` for fewer than three."""
    features = [(row[0], row[1], row[2]) for row in rows]
    if kind is CopyCurve and len({row[2] / max(1.0, row[1]) for row in rows}) == 1:
        features = [(row[0], 0.0, row[2]) for row in rows]  # pieces of one size: as in fit_copy
    return kind(*_coefficients(features, [Sample(0, 0, ns) for ns in times_ns]))


def fit_held_out(samples: Sequence[Sample], fit: Callable[[Sequence[Sample]], Curve]) -> tuple[Curve, Quality]:
    """The curve through all samples, and how well one through two thirds of them predicts the rest.

    A third of the samples is left out, three times over, so that each is predicted once by a curve that has not seen
    it. The thirds run diagonally through a grid of any width, so that none of them is a whole row or column.
    """
    ordered = sorted(samples, key=lambda sample: (sample.first, sample.second))
    errors: list[float] = []
    for turn in range(3):
        curve = fit([sample for at, sample in enumerate(ordered) if (at + at // 3) % 3 != turn])
        unseen = [sample for at, sample in enumerate(ordered) if (at + at // 3) % 3 == turn]
        errors += [abs(curve.ns(sample.first, sample.second) - sample.ns) / sample.ns for sample in unseen]
    return fit(ordered), Quality(len(errors), median(errors), max(errors))


def _coefficients(features: Sequence[Row], samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Least squares of the relative error: a prompt of 100 tokens is estimated as well as one of 8,000.

    Fitted repeatedly with less weight on outliers (Huber): one slow moment of the machine must not distort
    the curve.
    """
    if len(samples) < 3 or any(sample.ns <= 0 for sample in samples):
        raise UserError(f"{len(samples)} samples make no curve", hint="measure at least three, all above zero")
    times = np.array([sample.ns for sample in samples], dtype=np.float64)
    relative = np.array(features, dtype=np.float64) / times[:, None]
    weights = np.ones(len(samples))
    for _ in range(_REFITS):
        found = _solve_not_negative(relative, weights)
        errors = np.abs(relative @ found - 1.0)
        usual = max(float(np.median(errors)), _ERROR_MIN) * _FAR
        weights = np.sqrt(np.minimum(1.0, usual / np.maximum(errors, 1e-12)))
    first, second, third = (float(value) for value in found)
    return first, second, third


def _solve_not_negative(rows: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coefficients >= 0 that bring ``rows @ coefficients`` closest to 1, the squares weighted by ``weights ** 2``.

    The best solution uses some subset of the columns and is a plain least-squares solution there; three columns have
    seven subsets.
    """
    columns = rows.shape[1]
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    scaled = rows / scale * weights[:, None]
    best, best_loss = np.zeros(columns), float(np.square(weights).sum())
    for size in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), size):
            part = scaled[:, chosen]
            solution = np.linalg.lstsq(part, weights, rcond=None)[0]
            loss = float(np.square(part @ solution - weights).sum())
            if (solution >= 0).all() and loss < best_loss:
                best, best_loss = np.zeros(columns), loss
                best[list(chosen)] = solution
    return np.asarray(best / scale)
