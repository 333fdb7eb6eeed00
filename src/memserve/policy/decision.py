"""How the pieces of a prompt's prefix get their KV: the words for it (level 1)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from memserve.units import NS_PER_MS


class Way(enum.StrEnum):
    """How one piece of a prompt gets its KV."""

    REUSE = "reuse"  # it lies where attention reads
    SWAP_IN = "swap-in"  # from host memory
    FETCH = "fetch"  # from another instance
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Prefix:
    """Where the pieces of one prompt's prefix lie: first HBM, behind it DRAM, behind it another instance."""

    prompt_tokens: int
    hbm_tokens: int = 0
    dram_tokens: int = 0
    remote_tokens: int = 0
    """What the other instance has beyond the first two pieces."""
    same_host: bool = True
    """Whether that instance can be read through shared memory."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to serve a whole prompt: move the pieces up to some point, compute what is behind it."""

    ways: tuple[tuple[Way, int], ...]
    """Pieces in order, with their tokens; the last one is always recomputed, and never empty."""
    wait_ns: int
    """From now until the prefill can begin: other work before it, or a fetch that takes longer than that."""
    swap_ns: int
    prefill_ns: int

    @property
    def expected_ns(self) -> int:
        """From now until the first token."""
        return self.wait_ns + self.swap_ns + self.prefill_ns

    @property
    def name(self) -> str:
        """For example ``reuse 512 + swap-in 256 + recompute 32``."""
        return " + ".join(f"{way} {tokens}" for way, tokens in self.ways)


@dataclass(frozen=True, slots=True)
class Decision:
    """The quickest option, and those that it was chosen over."""

    chosen: Option
    others: tuple[Option, ...] = ()

    def tokens(self, way: Way) -> int:
        """Tokens that get their KV this way."""
        return sum(tokens for chosen_way, tokens in self.chosen.ways if chosen_way is way)

    @property
    def expected_ns(self) -> int:
        """From now until the first token."""
        return self.chosen.expected_ns

    @property
    def reason(self) -> str:
        """Why, in one line for people."""
        text = f"{self.chosen.name}: {_ms(self.expected_ns)}"
        if not self.others:
            return text
        rival = min(self.others, key=lambda option: option.expected_ns)
        return f"{text}; {rival.name}: {_ms(rival.expected_ns)}"

    @property
    def story(self) -> tuple[tuple[str, str | int | float], ...]:
        """The decision as facts for ``TokenOutput.story``."""
        return (("cost_decision", self.reason), ("cost_expected_ms", round(self.expected_ns / NS_PER_MS, 3)))


def _ms(ns: int) -> str:
    return f"{ns / NS_PER_MS:.1f} ms"
