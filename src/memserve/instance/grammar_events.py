"""What an instance asks of its host for the grammars of answers, and what the host answers.

The host builds grammars and computes masks where they can be stopped (:mod:`memserve.model.grammar_processes`); a
simulator answers when it likes.
"""

from __future__ import annotations

from dataclasses import dataclass

GRAMMAR_FAILED = "the form that is asked of the answer is more than the grammar engine takes"
"""The beginning of a row's reason when its own grammar cannot be followed, or of a request's."""


@dataclass(frozen=True, slots=True)
class BuildGrammar:
    """Build a grammar beside the steps, and answer with ``GrammarBuilt``. Then slots may be opened with it."""

    job_id: int
    grammar: str


@dataclass(frozen=True, slots=True)
class ForgetGrammar:
    """No request has this grammar any more, whether it is built or still being built: stop what works on it."""

    job_id: int
    grammar: str


@dataclass(frozen=True, slots=True)
class AwaitMask:
    """Answer with ``MaskComputed`` as soon as it is known what may come next in a slot with a late draw."""

    job_id: int
    slot: int


@dataclass(frozen=True, slots=True)
class GrammarBuilt:
    """The answer to ``BuildGrammar``."""

    job_id: int
    error: str = ""
    """Why there is no such grammar. Empty: it is there."""


@dataclass(frozen=True, slots=True)
class MaskComputed:
    """The answer to ``AwaitMask``: the next draw of the slot is not late, unless the slot has been given to another
    sequence."""

    job_id: int
