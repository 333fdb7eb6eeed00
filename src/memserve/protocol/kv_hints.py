"""Hints on KV, in the words of vLLM's proposals (vllm-project/vllm #51428, #53421): what a client may ask of cached
prefixes, what becomes of it, and how router and instances tell each other.

``retain`` is a named prefix with a priority (:class:`~memserve.protocol.messages.Pin`), because it lasts. The others
are done once, where the prefix lies, and answered.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from memserve.base.types import TokenArray, isolation
from memserve.protocol.peers import Holder, Message, Natural


class HintAction(enum.StrEnum):
    """What is asked for."""

    RETAIN = "retain"
    """Evict it after all that is neither retained nor pinned, for a time."""
    PREFETCH = "prefetch"
    """Bring it up to HBM, from DRAM, a store or another instance."""
    DEMOTE = "demote"
    """Move it from HBM to DRAM now."""
    SHARE = "share"
    """Copy it to another instance, or to the stores."""
    RELEASE = "release"
    """End its names; it is evicted first."""


class HintOutcome(enum.StrEnum):
    """What became of it, from the best on."""

    ACCEPTED = "accepted"
    """It is done for all whole blocks."""
    CLIPPED = "clipped"
    """For a part of them, or for less time."""
    DEFERRED = "deferred"
    """It is on its way; its end is not known yet."""
    REJECTED = "rejected"
    """It cannot be done here, or the quota has no room; the reason says which."""
    MISSING = "missing"
    """Nothing of it is cached."""


@dataclass(frozen=True, slots=True)
class HintResult:
    """The outcome of one action."""

    outcome: HintOutcome
    tokens: int = 0
    """For how many it was done."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class KvHinted:
    """A client asked for ``action``."""

    hint_id: str
    action: HintAction
    tenant: str
    handle: str
    """A name of the prefix. Empty: it has none."""
    tokens: TokenArray | None
    """None: those of the name."""
    salt: str = ""
    destination: str = ""
    """Of ``SHARE`` and ``PREFETCH``: an instance, or ``store``. Empty: where it lies."""
    ttl_ns: int = 0
    priority: float = 0.0
    """Of ``RETAIN``, under the name ``handle``."""

    @property
    def isolation(self) -> str:
        """:func:`memserve.base.types.isolation` of the prefix's tenant and salt."""
        return isolation(self.tenant, self.salt)


class KvHint(Message, frozen=True, tag=True):
    """Do this with the cached prefix of ``tokens``; answered by :class:`KvHintDone`. An older member ignores it."""

    hint_id: str
    action: str
    tenant: str
    """Its isolation, as of a ``Pin``."""
    tokens: TokenArray
    holders: tuple[Holder, ...] = ()
    """Of ``prefetch``: where more of it lies."""


class KvHintDone(Message, frozen=True, tag=True):
    """What became of a hint at its sender."""

    hint_id: str
    outcome: str
    tokens: Natural = 0
    reason: str = ""


RESULTS_MAX = 4096
"""Results that are kept until a client asks for them."""


class HintResults:
    """The newest results, by hint."""

    def __init__(self) -> None:
        self._results: dict[str, HintResult] = {}

    def put_result(self, hint_id: str, result: HintResult) -> None:
        """It replaces an earlier one."""
        self._results.pop(hint_id, None)
        self._results[hint_id] = result
        if len(self._results) > RESULTS_MAX:
            del self._results[next(iter(self._results))]

    def result_of(self, hint_id: str) -> HintResult | None:
        """None: it is not known, yet or any more."""
        return self._results.get(hint_id)


def names_to_release(target: TokenArray, names: Iterable[tuple[str, TokenArray]]) -> list[str]:
    """Names of retained prefixes that end with a release of ``target``, whole blocks: those that begin with it, if all
    of them lie on one path. Else they share it, and none ends."""
    continuations = [(name, tokens) for name, tokens in names if np.array_equal(tokens[: len(target)], target)]
    longest = max((tokens for _, tokens in continuations), key=len, default=target)
    is_one_path = all(np.array_equal(longest[: len(tokens)], tokens) for _, tokens in continuations)
    return [name for name, _ in continuations] if is_one_path and len(target) else []


def result_for(done: int, wanted: int, reason: str = "") -> HintResult:
    """Of an action that was done for ``done`` of ``wanted`` tokens, both whole blocks. ``reason``: for less."""
    if done >= wanted:
        return HintResult(HintOutcome.ACCEPTED, done)
    return HintResult(HintOutcome.CLIPPED if done else HintOutcome.REJECTED, done, reason)


UNKNOWN_NAME = "the name keeps no KV: say which tokens are meant"
NOTHING_CACHED = HintResult(HintOutcome.MISSING, 0, "nothing of it is cached")
