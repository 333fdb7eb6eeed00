"""Agents as they are today: a long prompt with tools, and many turns, each of which ends in a tool call.

Sizes follow 125 sessions of a coding agent (medians: 36 turns, 360 new tokens a turn, 230 of an answer, prompts of
100,000 tokens), scaled by :class:`AgentShape`; how long tools take is one of :data:`GAPS`. Only lengths are made, no
text: the workloads are for the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from memserve.base.errors import UserError
from memserve.base.units import ceil_div
from memserve_lab.workloads.records import Blocks, Session, Span, Turn, Workload

BLOCK_TOKENS = 16

Gap = tuple[str, float]
"""A tool's name, and how long this call of it takes, in seconds."""
DrawGap = Callable[[Random, int], Gap]
"""Draws the gap behind a turn; the number says how many sessions have begun before."""


@dataclass(frozen=True, slots=True)
class AgentShape:
    """Sizes of sessions, in tokens. New tokens, answers and turns are lognormal."""

    shared_tokens: int = 4_000
    """Of the head of all prompts: system prompt and tools."""
    first_tokens: int = 20_000
    """Of a session's own part of the first prompt: the median."""
    turn_tokens: int = 400
    """That the result of a tool adds: the median; the mean is 1.9 times as much."""
    answer_tokens: int = 200
    """The median; the mean is 1.4 times as much."""
    turns: int = 16
    """The median."""

    def draw_turns(self, random: Random) -> int:
        """Turns of a session."""
        return max(3, min(4 * self.turns, round(random.lognormvariate(math.log(self.turns), 0.6))))


TOOLS: dict[str, tuple[float, float, float]] = {
    # weight, median seconds, sigma
    "read_file": (0.34, 0.3, 0.5),
    "edit_file": (0.22, 0.4, 0.5),
    "search": (0.18, 0.8, 0.6),
    "shell": (0.16, 3.0, 0.9),
    "web": (0.05, 6.0, 0.7),
    "run_tests": (0.05, 30.0, 0.6),
}
"""What agents call, and how long that takes."""


def draw_tool(random: Random) -> str:
    """A tool's name."""
    return random.choices(list(TOOLS), [weight for weight, _, _ in TOOLS.values()])[0]


def gap_by_tool(random: Random, begun: int) -> Gap:
    """Lognormal, and each tool has its own."""
    tool = draw_tool(random)
    _, median_s, sigma = TOOLS[tool]
    return tool, random.lognormvariate(math.log(median_s), sigma)


def gap_of_two_kinds(random: Random, begun: int) -> Gap:
    """Most calls take a second; of every tool one in eight waits for a person or a build, with a heavy tail (Pareto,
    from 8 s on)."""
    tool = draw_tool(random)
    if random.random() < 0.125:
        return tool, min(900.0, 8.0 * random.paretovariate(1.2))
    return tool, random.lognormvariate(0.0, 0.6)


def gap_of_any_length(random: Random, begun: int) -> Gap:
    """From 0.1 s to 100 s, as many in each decade, whatever the tool: no history says which."""
    return draw_tool(random), 10 ** random.uniform(-1.0, 2.0)


def gap_against_history(random: Random, begun: int) -> Gap:
    """Each tool is quick for a while, and then slow: what was learnt is wrong again and again."""
    tool = draw_tool(random)
    is_slow = (begun // 12 + len(tool)) % 2
    return tool, random.lognormvariate(math.log(20.0 if is_slow else 0.5), 0.3)


GAPS: dict[str, DrawGap] = {
    "tools": gap_by_tool,
    "two-kinds": gap_of_two_kinds,
    "any": gap_of_any_length,
    "against": gap_against_history,
}
"""Distributions of gaps by name: two that a history predicts, two that none does."""


def agent_workload(shape: AgentShape, gaps: str, users: int, sessions: int, seed: int = 0) -> Workload:
    """``sessions`` sessions, of which ``users`` are open at a time. Raises :class:`UserError` for unknown ``gaps``."""
    draw_gap = GAPS.get(gaps)
    if draw_gap is None:
        raise UserError(f"unknown gaps {gaps!r}", hint=f"one of {', '.join(GAPS)}")
    random = Random(f"agents {gaps} {seed}")
    shared_blocks = ceil_div(shape.shared_tokens, BLOCK_TOKENS)
    made, first = [], shared_blocks
    for number in range(sessions):
        turns, tool, gap_s = [], "", 0.0
        count = shape.draw_turns(random)
        for turn in range(count):
            median = shape.turn_tokens if turn else shape.first_tokens
            own = max(16, round(random.lognormvariate(math.log(median), 1.13 if turn else 0.4)))
            answer = max(8, min(4096, round(random.lognormvariate(math.log(shape.answer_tokens), 0.8))))
            spans = (Span(first, own),) if turn else (Span(0, shared_blocks * BLOCK_TOKENS), Span(first, own))
            first += ceil_div(own, BLOCK_TOKENS)
            think_s = gap_s
            tool, gap_s = draw_gap(random, number) if turn < count - 1 else ("", 0.0)
            turns.append(Turn(Blocks(BLOCK_TOKENS, spans), answer, think_s=think_s, tool=tool))
        made.append(Session(f"agent-{number}", tuple(turns)))
    return Workload("agents", f"generated, gaps: {gaps}", tuple(made), seed, users=users)


def context_tokens(session: Session) -> list[int]:
    """Of each turn: its prompt and its answer."""
    total, contexts = 0, []
    for turn in session.turns:
        says = turn.says
        total += (says.tokens if isinstance(says, Blocks) else 0) + turn.output_tokens_max
        contexts.append(total)
    return contexts
