"""How many tokens a step gives with drafts, whatever the machine: the draft policy, run over answers that are known.

    python bench/speculation.py --data DIR --requests FILE ...      # writes the prompts
    python bench/draft_policy.py --requests FILE [--drafts 8]

No model runs. *chats*: answers of the model, as the next turn's prompt has them; *agents*: what recorded agents and
their tools said next. Each is decoded token by token with the drafts of ``instance/speculation/drafts.py``, at fixed
prices: a step of one sequence takes 1, a drafted token ``--cost`` of it. Printed: tokens a step, drafts and how many
were kept; by number of equal tokens how often a place was found, how often the first token behind it was right, and a
token behind right ones.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
from harness.flags import need, options, save

from memserve.instance.speculation.drafts import EXPECTED, Chances, Pace, Price, paying_length, repeated_draft
from memserve.instance.speculation.speculation import FADE_SEEN

Answer = tuple[list[int], list[int]]
END, TAIL = 2, 6  # SmolLM2's end of a turn; tokens of its template behind a prompt
ANSWER_TOKENS = 96
BLOCK_TOKENS = 32


def chat_answers(prompts: list[list[int]]) -> list[Answer]:
    """Prompts with the answer that the next turn's prompt shows."""
    results = []
    for prompt in prompts:
        later = next((item[len(prompt) :] for item in prompts if item != prompt and item[: len(prompt)] == prompt), [])
        answer = later[: later.index(END)] if END in later else later
        if len(answer) > TAIL:
            results.append((prompt, answer))
    return results


def agent_answers(prompts: list[list[int]]) -> list[Answer]:
    """Prompts with what the next recorded call has behind them."""
    results = []
    for prompt in prompts:
        begin = prompt[:-TAIL]
        longer = (
            item[len(begin) :] for item in prompts if len(item) > len(prompt) + 40 and item[: len(begin)] == begin
        )
        if answer := next(longer, []):
            results.append((begin, answer[:ANSWER_TOKENS]))
    return results


def agreeing(drafts: list[int], answer: list[int]) -> int:
    """How many of ``drafts`` are right."""
    return next((place for place, token in enumerate(drafts) if answer[place : place + 1] != [token]), len(drafts))


def decode(answers: list[Answer], drafts_max: int, price: Price) -> dict[str, float]:
    """Every answer, with drafts that pay at ``price``."""
    chances, steps, tokens, drafted, kept_count = Chances(FADE_SEEN), 0, 0, 0, 0
    for prompt, answer in answers:
        pace, place = Pace(), 1
        while place < len(answer):
            known_tokens = np.array(prompt + answer[:place], np.int32)
            draft = repeated_draft(
                known_tokens, min(drafts_max, len(answer) - place, -len(known_tokens) % BLOCK_TOKENS)
            )
            chance = pace.chances.chance_of(draft.source, chances.chance_of(draft.source, EXPECTED[draft.source]))
            count = paying_length(chance, price, len(draft.tokens))
            right = agreeing(draft.tokens[:count], answer[place:])
            if count:
                pace.source = draft.source
                pace.learn_outcome(count, right)
                chances.learn_outcome(draft.source, count, right)
            steps, drafted, kept_count, place = steps + 1, drafted + count, kept_count + right, place + 1 + right
        tokens += len(answer) - 1
    return {"tokens_a_step": round(tokens / max(1, steps), 3), "drafts": drafted, "kept": kept_count}


def chances(answers: list[Answer]) -> dict[int, tuple[int, float, float]]:
    """By number of equal tokens: places, how often the first token behind one was right, and each one behind it."""
    counts: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for prompt, answer in answers:
        for place in range(1, len(answer) - 1):
            draft = repeated_draft(np.array(prompt + answer[:place], np.int32), 8)
            right = agreeing(draft.tokens, answer[place:])
            if draft.tokens:
                more = 1, int(right > 0), min(8, right + 1), right
                counts[draft.source] = [a + b for a, b in zip(counts[draft.source], more, strict=True)]
    return {source: (n, round(a / n, 2), round(k / t, 2)) for source, (n, a, t, k) in sorted(counts.items())}


def main() -> None:
    args = options(
        __doc__, required="requests", requests=(Path, "what bench/speculation.py --requests wrote"), drafts=8,
        cost=(0.04, "of a drafted token, in steps of one sequence"),
    )  # fmt: skip
    prompts, rows = json.loads(need(args.requests, "requests").read_text()), []
    for kind, answers in (("chats", chat_answers(prompts["chats"])), ("agents", agent_answers(prompts["agents"]))):
        row = {"kind": kind, "answers": len(answers), **decode(answers, args.drafts, Price(1.0, args.cost))}
        rows.append({**row, "chances": chances(answers)})
        print(json.dumps(rows[-1]), flush=True)
    save(args, rows)


if __name__ == "__main__":
    main()
