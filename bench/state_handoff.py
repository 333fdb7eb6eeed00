"""A model with recurrent states: what a handoff moves, and what it saves against computing again.

    python bench/state_handoff.py [--families qwen3_5,lfm2,falcon_h1] [--prompt-tokens 256,1024] [--rounds 5]

A random model of each family serves as ``--prefill 1 --decode 1``, and beside it in one instance without a cache, by
turns within each round, on one thread each. *Cold* is a prompt never asked before; *next turn* is that prompt, its
answer and a few tokens more. *Gap* is the time between the first token, from the prefill instance, and the second, from
the decode instance, less a later token's; of one instance it is what noise makes. Bytes are those that the request's
story tells.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import httpx
from harness.clients import Answer, completion, greedy
from harness.flags import Commas, options, save
from harness.rounds import Samples, median, turns
from harness.served import Served, serving
from harness.tables import Table

SIDES = {"pair": ("--prefill", "1", "--decode", "1"), "alone": ("--colocated", "1", "--caching", "off")}
SIZES: dict[str, int] = {"hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 8192}
DELTA = {"linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
FAMILY_SIZES = {"qwen3_5": SIZES | DELTA | {"head_dim": 64}, "falcon_h1": SIZES | {"mamba_d_ssm": 64}}
ANSWER_TOKENS, NEW_TOKENS, VOCAB = 48, 16, 131
COLUMNS = {
    "family": "{family}", "prompt": "{tokens}", "KV, bytes": "{kv_bytes:,}", "state, bytes": "{state_bytes:,}",
    "cold TTFT, ms": "{cold_ms:.1f}", "alone": "{alone_cold_ms:.1f}", "gap, ms": "{gap_ms:.2f}",
    "alone ": "{alone_gap_ms:.2f}", "next turn TTFT, ms": "{next_ms:.1f}", "computed again": "{again_ms:.1f}",
    "cached": "{cached:.0%}",
}  # fmt: skip


def gap_ms(answer: Answer) -> float:
    """Between the first two tokens, less a later one's time."""
    return 1e3 * (answer.steps_s[0] - median(answer.steps_s[2:]))


def facts_of(server: Served, prompt: list[int]) -> dict[str, Any]:
    """What the story of one request tells, and how much of the prompt was cached."""
    body = greedy(prompt, 4) | {"explain": True, "stream": False}
    body.pop("stream_options", None)
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).raise_for_status().json()
    facts = {fact["fact"]: fact["value"] for fact in answer["memserve"]["story"]}
    cached_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return facts | {"cached_share": cached_tokens / len(prompt)}


def measure(servers: dict[str, Served], tokens: int, rounds: int, rng: Random) -> dict[str, float]:
    """One row."""
    samples, random_tokens = Samples(), lambda count: [rng.randrange(3, VOCAB) for _ in range(count)]
    prompts = {number: random_tokens(tokens) for number in range(-1, rounds)}
    facts: list[dict[str, Any]] = []
    for number, side in turns(rounds, servers, warm=1):
        server, prompt = servers[side], prompts[number]
        answer = completion(server.url, prompt, ANSWER_TOKENS).checked()
        longer = [*prompt, *(int(word[1:]) for word in answer.text.split())]
        later = completion(server.url, [*longer, *random_tokens(NEW_TOKENS)], 2).checked()
        if number < 0:
            continue
        samples[side, "cold"].append(1e3 * answer.first_s)
        samples[side, "gap"].append(gap_ms(answer))
        samples[side, "next"].append(1e3 * later.first_s)
        if side == "pair":
            told = facts_of(server, random_tokens(tokens))
            told["cached_share"] = facts_of(server, [*longer, *random_tokens(NEW_TOKENS)])["cached_share"]
            facts.append(told)
    state_bytes = median(told["handoff_state_bytes"] for told in facts)
    return {
        "kv_bytes": int(median(told["handoff_bytes"] for told in facts) - state_bytes),
        "state_bytes": int(state_bytes),
        "cold_ms": samples.median(("pair", "cold")),
        "alone_cold_ms": samples.median(("alone", "cold")),
        "gap_ms": samples.median(("pair", "gap")),
        "alone_gap_ms": samples.median(("alone", "gap")),
        "next_ms": samples.median(("pair", "next")),
        "again_ms": samples.median(("alone", "next")),
        "cached": median(told["cached_share"] for told in facts),
    }


def main() -> None:
    """Both servers of a family at once; a row for each length."""
    args = options(
        __doc__, families=Commas("qwen3_5", "lfm2", "falcon_h1"), prompt_tokens=Commas(256, 1024), rounds=5,
        kv_memory="256MiB",
    )  # fmt: skip
    from tiny_models import save_folder, tiny_module

    rows, table, rng = [], Table(COLUMNS), Random(0)
    for family in args.families:
        with tempfile.TemporaryDirectory(prefix="memserve-states-") as home:
            model = str(save_folder(tiny_module(family, **FAMILY_SIZES.get(family, SIZES)), Path(home) / "x"))
            common = ("--dtype", "float32", "--threads", "1", "--kv-memory", args.kv_memory, "--metadata", "none")
            common += ("--served-model-name", "x")
            with (
                serving(*SIDES["pair"], *common, model=model) as pair,
                serving(*SIDES["alone"], *common, model=model) as alone,
            ):
                for tokens in args.prompt_tokens:
                    measures = measure({"pair": pair, "alone": alone}, tokens, args.rounds, rng)
                    rows.append({"family": family, "tokens": tokens, **measures})
                    table.show(rows[-1])
    save(args, rows)


if __name__ == "__main__":
    sys.exit(main())
