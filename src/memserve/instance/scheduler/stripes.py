"""A prompt that several instances compute at once, as one of them sees it: which rows are its own, and what it awaits.

::

    tokens     | stripe 0 | stripe 1 | stripe 2 | stripe 3 | ...
    computed     A          B          A          B              rows of A: stripes 0 and 2
    comes        to B       to A       to B       to A           layer by layer, into blocks of the sequence there

A row begins when layer 0 of all stripes before it has come, so the instances that compute those are at work; it reads a
layer of them when that has come, and the device waits for it (:class:`~memserve.instance.events.MoveGate`). No step
waits for one that has not begun before it: however many such prompts there are, none waits for itself.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from memserve.base.errors import check


@dataclass(slots=True)
class StripeProgress:
    """Tokens ``[first, end)`` of the prompt."""

    first: int
    end: int
    is_own: bool
    """Computed here."""
    layers: int = 0
    """Of another instance's stripe: so many layers of it are here."""


class StripedPrompt:
    """The stripes of a sequence, and how far those of others have come."""

    def __init__(self, stripes: Items[StripeProgress], num_layers: int) -> None:
        """``stripes``: of the whole prompt here, in order; the last one is computed here."""
        check(bool(stripes) and stripes[-1].is_own, "a striped prompt ends with a stripe of others")
        self.stripes, self.num_layers = tuple(stripes), num_layers
        #: why it cannot be computed any more. Empty: it can
        self.loss = ""
        #: tokens that the cache had when the sequence got its blocks
        self.cached_tokens = 0

    def next_row(self, computed: int, published: int) -> tuple[int, int] | None:
        """Tokens ``[start, end)`` that come next behind ``computed`` ones: no row goes beyond ``end``. None: they
        cannot be computed yet. ``published``: tokens that the cache has of the sequence."""
        # a part that has failed stays where it is until its router has been told
        if self.loss:
            return None
        # of a stripe that was cached here meanwhile no layer need come: what others send of it is dropped
        self.cached_tokens = max(self.cached_tokens, published)
        for stripe in self.stripes:
            if stripe.end <= computed:
                continue
            if stripe.is_own:
                return max(stripe.first, computed), stripe.end
            if not self._layers_of(stripe):
                return None
        return None

    def layers_before(self, start: int) -> int:
        """Of how many layers a row from ``start`` on may read all tokens before it."""
        return min(
            [self._layers_of(stripe) for stripe in self.stripes if stripe.first < start], default=self.num_layers
        )

    def stripe_at(self, token: int) -> int:
        """The number of the stripe that has ``token``."""
        return next(place for place, stripe in enumerate(self.stripes) if token < stripe.end)

    def _layers_of(self, stripe: StripeProgress) -> int:
        is_here = stripe.is_own or stripe.end <= self.cached_tokens
        return self.num_layers if is_here else stripe.layers
