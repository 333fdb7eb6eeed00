"""Grammars of requests that run here: which ones the host builds, and which ones it has.

A request waits for its grammar as it waits for KV of another instance: no step is planned with it, and so none waits
for the grammar. A grammar that several requests name is built once, and kept until the last of them has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from memserve.instance.events import BuildGrammar, ForgetGrammar
from memserve.units import NS_PER_S

BUILD_NS = 15 * NS_PER_S
"""The longest that requests wait for their grammar."""


@dataclass(slots=True)
class _Wanted:
    job_id: int
    requests: int


class GrammarWaits:
    """All grammars of unfinished requests, by their texts."""

    __slots__ = ("_jobs", "_pending", "_wanted", "orders")

    def __init__(self) -> None:
        self._wanted: dict[str, _Wanted] = {}
        #: those that are being built, oldest first -> when requests wait no longer
        self._pending: dict[str, int] = {}
        self._jobs = 0
        #: for the host, in order; the machine takes them
        self.orders: list[BuildGrammar | ForgetGrammar] = []

    def opened(self, grammar: str, now: int) -> None:
        """A request with ``grammar`` has come; empty: it has none."""
        if not grammar:
            return
        wanted = self._wanted.get(grammar)
        if wanted is not None:
            wanted.requests += 1
            return
        self._jobs += 1
        self._wanted[grammar] = _Wanted(self._jobs, 1)
        self._pending[grammar] = now + BUILD_NS
        self.orders.append(BuildGrammar(self._jobs, grammar))

    def closed(self, grammar: str) -> None:
        """A request with ``grammar`` has ended."""
        if not grammar:
            return
        wanted = self._wanted[grammar]
        wanted.requests -= 1
        if not wanted.requests:
            del self._wanted[grammar]
            self._pending.pop(grammar, None)
            self.orders.append(ForgetGrammar(grammar))

    def awaited(self, grammar: str) -> bool:
        """Whether ``grammar`` is being built."""
        return grammar in self._pending

    def built(self, job_id: int) -> str:
        """A job is done. Returns its grammar; empty: no request waits for it any more."""
        for grammar in self._pending:
            if self._wanted[grammar].job_id == job_id:
                del self._pending[grammar]
                return grammar
        return ""

    def overdue(self, now: int) -> list[str]:
        """Grammars that requests have waited for as long as they may; they count as built from now on."""
        late = [grammar for grammar, until_ns in self._pending.items() if until_ns <= now]
        for grammar in late:
            del self._pending[grammar]
        return late

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`overdue` is worth calling. None: nothing is being built."""
        return next(iter(self._pending.values()), None)

    def take_orders(self) -> list[BuildGrammar | ForgetGrammar]:
        """What the host has to do since the last call."""
        taken, self.orders = self.orders, []
        return taken

    def users(self) -> dict[str, int]:
        """Requests by grammar, for checks."""
        return {grammar: wanted.requests for grammar, wanted in self._wanted.items()}
