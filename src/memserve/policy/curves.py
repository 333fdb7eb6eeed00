"""The curves that times are taken from (level 1): few coefficients, each with a meaning, none negative.

::

    prefill   step + token * new + pair * (pairs of query and key)     LayerKV, equation 3: the quadratic part
    decode    step + row * batch + context * (tokens attended to)
    copy      start + piece * pieces + byte * bytes                    discrete and aggregated differ in pieces only

The defaults take computing to be quick, and those of :class:`CostModel` moving to be slow: without a profile nothing is
moved unless it clearly pays.
"""

from __future__ import annotations

from dataclasses import dataclass

from memserve.units import NS_PER_MS


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Computing a prompt, or the rest of one."""

    step_ns: float = 2.0 * NS_PER_MS
    """A step that computes hardly anything: reading the weights once."""
    token_ns: float = 200_000.0
    """Each new token: the linear layers."""
    pair_ns: float = 10.0
    """Each pair of a new token and one that it attends to, over all layers and heads."""

    def ns(self, new_tokens: int, context_tokens: int) -> int:
        """``new_tokens`` computed behind ``context_tokens`` whose KV is there."""
        return self.step(new_tokens, attended_pairs(new_tokens, context_tokens))

    def step(self, new_tokens: int, pairs: int) -> int:
        """One step over pieces of several prompts: ``new_tokens`` and their ``pairs``, summed over the pieces."""
        return round(self.step_ns + self.token_ns * new_tokens + self.pair_ns * pairs) if new_tokens > 0 else 0


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """One step that gives each of some sequences its next token."""

    step_ns: float = 10.0 * NS_PER_MS
    row_ns: float = 200_000.0
    """Each sequence of the batch."""
    context_ns: float = 30.0
    """Each token attended to, summed over the batch: its KV is read."""

    def ns(self, batch: int, context_tokens: int) -> int:
        """``batch`` sequences with ``context_tokens`` altogether."""
        return round(self.step_ns + self.row_ns * batch + self.context_ns * context_tokens) if batch > 0 else 0


@dataclass(frozen=True, slots=True)
class CopyCurve:
    """Moving bytes over one link, in pieces that each lie in one place."""

    start_ns: float
    piece_ns: float
    byte_ns: float

    def ns(self, copy_bytes: int, pieces: int = 1) -> int:
        """``copy_bytes`` in all, in ``pieces`` pieces."""
        return round(self.start_ns + self.piece_ns * pieces + self.byte_ns * copy_bytes) if copy_bytes > 0 else 0


def attended_pairs(new_tokens: int, context_tokens: int) -> int:
    """Pairs of query and key when ``new_tokens`` attend to ``context_tokens`` before them and, causally, to each
    other."""
    return new_tokens * context_tokens + new_tokens * (new_tokens + 1) // 2
