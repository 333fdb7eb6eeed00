"""ReAct type (level 1): an agent thinks, acts and observes, behind worked examples (Yao et al. 2022; MemServe 8.2).

The model writes ``thought`` and ``action``; the environment's recorded observation follows whatever it wrote::

    <examples>                      shared by all sessions
    Question: ...
    Thought 1:                      <- turn 1 ends here; the model goes on, up to "\\nObservation"
    Observation 1: ...
    Thought 2:                      <- turn 2
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from memserve.errors import check
from memserve.workloads.draws import draws
from memserve.workloads.records import Episode, Step
from memserve.workloads.tokens import ByteMeter, Meter
from memserve.workloads.words import Session, Text, Turn, Workload

SHOTS = 2
"""Worked examples in front ("a long two-shot example", MemServe 8.2)."""
STOP = ("\nObservation",)


def react_workload(
    episodes: Sequence[Episode],
    examples: str,
    *,
    source: str,
    seed: int,
    sessions: int | None = None,
    more_questions: Sequence[str] = (),
    shots: int = SHOTS,
    meter: Meter | None = None,
) -> Workload:
    """A session an episode: every step a turn, the model's own thoughts and actions in the history.

    Where more ``sessions`` are wanted than there are episodes, the further ones ask one of ``more_questions`` (or an
    old question again) and are shown the observations of a drawn episode: real lengths and step counts.
    """
    meter, head = meter or ByteMeter(), _examples_head(examples, shots)
    episodes = [episode for episode in episodes if episode.steps]
    check(episodes, "an episode with a step to draw from")
    rng, made = draws(seed, "react"), []
    for number in range(len(episodes) if sessions is None else sessions):
        episode = episodes[number] if number < len(episodes) else episodes[int(rng.integers(len(episodes)))]
        further = number - len(episodes)
        question = (
            more_questions[further % len(more_questions)] if further >= 0 and more_questions else episode.question
        )
        name = f"{episode.record_id}-{number}" if further >= 0 else episode.record_id
        made.append(Session(name, _turns(head, question, episode.steps, meter), group="react"))
    notes = (f"{shots} worked examples in front",)
    return Workload("react", source, tuple(made), seed=seed, notes=notes)


def _examples_head(examples: str, shots: int) -> str:
    """The first ``shots`` examples of a prompt: each begins with ``Question:`` at the start of a line."""
    starts = [match.start() for match in re.finditer(r"^Question:", examples, flags=re.MULTILINE)]
    return examples if shots >= len(starts) else examples[: starts[shots]]


def _turns(head: str, question: str, steps: Sequence[Step], meter: Meter) -> tuple[Turn, ...]:
    turns, asked = [], f"{head.rstrip()}\nQuestion: {question}\nThought 1:"
    for number, step in enumerate(steps, 1):
        answer = f" {step.thought}\nAction {number}: {step.action}"
        turns.append(Turn(Text(asked), max(1, len(meter.encode(answer))), answer=answer, stop=STOP))
        asked = f"\nObservation {number}: {step.observation}\nThought {number + 1}:"
    return tuple(turns)
