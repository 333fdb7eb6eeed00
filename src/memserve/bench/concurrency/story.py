"""What is sent: four bursts, one after the other, as llm-serving-cache's validation has them (level 4, row C8).

========== ==========================================================================
cold       all ask the same, which nobody has asked before
warm       all ask the same again
shared     all begin with the first three quarters of it, and end each in their own way
unrelated  each asks something of its own
========== ==========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from memserve.workloads.draws import draws
from memserve.workloads.prose import prose
from memserve.workloads.words import Session, Text, Turn, Workload

SCENARIOS = ("cold", "warm", "shared", "unrelated")
SHARED_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class Story:
    """One burst of each scenario; equal arguments, equal prompts."""

    concurrency: int
    prompt_words: int
    """Every word is one token at least."""
    output_tokens: int
    seed: int
    turn: int
    """Of the repetitions: each has prompts of its own."""

    def bursts(self) -> dict[str, Workload]:
        """Scenario -> requests that are all due at once, in the order in which they are to be sent."""
        first = self._prose(self.prompt_words, "first")
        head_words = round(self.prompt_words * SHARED_SHARE)
        head = " ".join(first.split()[:head_words])
        count = range(self.concurrency)
        texts = {
            "cold": [first] * self.concurrency,
            "warm": [first] * self.concurrency,
            "shared": [f"{head} {self._prose(self.prompt_words - head_words, 'end', at)}" for at in count],
            "unrelated": [self._prose(self.prompt_words, "own", at) for at in count],
        }
        return {scenario: self._burst(scenario, texts[scenario]) for scenario in SCENARIOS}

    def _prose(self, words: int, *purpose: str | int) -> str:
        return prose(draws(self.seed, self.turn, self.concurrency, *purpose), words)

    def _burst(self, scenario: str, texts: list[str]) -> Workload:
        sessions = []
        for at, text in enumerate(texts):
            turns = (Turn(Text(text), self.output_tokens, due_s=0.0),)
            name = f"{scenario}-{self.turn}-{self.concurrency}-{at}"
            sessions.append(Session(name, turns, group=str(self.concurrency)))
        return Workload(scenario, "built-in", tuple(sessions), self.seed, "all at once")
