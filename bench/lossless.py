"""Is greedy fp32 output token-identical to transformers' ``generate``, under every cache and scheduler setting?

    python bench/lossless.py --data DIR --reference-model FOLDER [--settings warm,n4] [--prompts 72] [--reference FILE]

Prompts are real multi-turn conversations and documents with questions (``DIR/conversations``, ``DIR/longdocs``). The
reference is computed once, with the model as transformers itself loads it, and cached in ``--reference``. A difference
counts as a *tie* only where the reference's own two best logits lie within 1e-4; it is listed, never hidden.
Prints one line per setting; the exit status is 1 if any setting differs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from harness.chats import Reference, load_tokenizer, read, remembered
from harness.flags import need, options, save

TIE_LOGITS = 1e-4
MIB = 1 << 20
WORKERS: list[tuple[str, dict[str, Any]]] = [
    ("TP 2", {"tensor_parallel": 2}),
    ("TP 3", {"tensor_parallel": 3}),
    ("PP 2", {"pipeline_parallel": 2}),
    ("TP 2 x PP 2", {"tensor_parallel": 2, "pipeline_parallel": 2}),
]
"""Instances of several workers: SmolLM2-135M has 3 KV heads, so that two parts are not alike."""


@dataclass
class Setting:
    """One way to run the same prompts: engine options, and counters that must have grown for the run to count."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    warm: bool = False  # run everything twice, compare the second run
    n: int = 1
    must: tuple[str, ...] = ()  # fields of InstanceStats that must be positive afterwards


def settings(block_bytes: int, longest_tokens: int) -> list[Setting]:
    """Every setting. The small pool holds little more than the longest prompt."""
    small, large = block_bytes * (longest_tokens // 32 + 10), 4096 * MIB
    roomy = {"kv_memory_bytes": large}
    tight = {"kv_memory_bytes": small, "dram_memory_bytes": large}
    by_layer = {**tight, "layerwise": "auto"}
    moved, cached, drafted = ("layers.begun", "layers.link.up_bytes"), ("cached_tokens",), ("drafts_kept",)
    layerwise = ("auto", "layerkv", "next-layer", *(f"static-{layer_count}" for layer_count in range(31)))
    return [
        Setting("caching off", {**roomy, "caching": False}),
        Setting("caching on, cold", roomy),
        Setting("caching on, warm", roomy, warm=True, must=cached),
        *(Setting(f"chunk {count}", {**roomy, "prefill_chunk_tokens": count}) for count in (16, 64, 512)),
        *(Setting(f"batch {count}", {**roomy, "max_running": count}) for count in (1, 8, 32)),
        *(
            Setting(
                f"tiny pool, {mode}, caching {word}", {**tight, "preemption": mode, "caching": word == "on"},
                must=(f"preemptions_{mode}",),
            )
            for mode in ("swap", "recompute")
            for word in ("on", "off")
        ),
        Setting("evicted to DRAM and back", tight, warm=True, must=("cached_tokens", "dram_tokens_reused")),
        Setting("n = 4", roomy, n=4),
        Setting("n = 4, tiny pool", tight, n=4),
        Setting("one step in flight", {**roomy, "steps_in_flight": 1}),
        Setting("drafts 8, batch 1", {**roomy, "draft_tokens": 8, "max_running": 1}, must=drafted),
        Setting("drafts 32, batch 4", {**roomy, "draft_tokens": 32, "max_running": 4}, must=drafted),
        Setting("drafts 8, warm", {**roomy, "draft_tokens": 8, "max_running": 4}, warm=True, must=drafted),
        *(
            Setting(
                f"by layer, {mode}", {**tight, "layerwise": mode, "caching": False, "link_gbps": 16.0}, must=moved
            )
            for mode in layerwise
        ),
        Setting("by layer, caching on, warm", by_layer, warm=True, must=("cached_tokens", "layers.begun")),
        Setting("by layer, n = 4", by_layer, n=4),
        *(Setting(f"{text}, warm", {**roomy, **words}, warm=True, must=cached) for text, words in WORKERS),
        *(
            Setting(f"{text}, tiny pool, swap", {**tight, **words, "preemption": "swap"}, must=("preemptions_swap",))
            for text, words in WORKERS[:1] + WORKERS[-1:]
        ),
        Setting("TP 2, n = 4", {**roomy, "tensor_parallel": 2}, n=4),
        Setting("TP 2, by layer", {**by_layer, "tensor_parallel": 2, "caching": False}, must=moved),
    ]  # fmt: skip


# -- prompts


def conversations(data: Path, count: int) -> Iterator[list[dict[str, str]]]:
    """Long chats, each at two successive user turns, so that the prompts share prefixes."""
    for name in ("mtrag_un_human", "mtbench101"):
        chats = [r["messages"] for r in read(data / "conversations" / f"{name}.jsonl.gz")]
        chats.sort(key=lambda m: (-len(m), json.dumps(m)))
        for messages in chats[: count // 4]:
            turns = [i for i, m in enumerate(messages) if m["role"] == "user"]
            for last in turns[-2:]:
                yield messages[: last + 1]


def documents(data: Path, tokenizer: Any, count: int) -> Iterator[list[dict[str, str]]]:
    """A document of 2,000 tokens and more with a question, its answer, and a second question."""
    sources = ("loogle_wikipedia", "qmsum_meetings")
    records = [r for name in sources for r in read(data / "longdocs" / f"{name}.jsonl.gz")]
    for i, record in enumerate(records[:count]):
        questions = record["questions"]
        ids = tokenizer(record["document"], add_special_tokens=False)["input_ids"][: 2000 + 50 * i]
        first, second = questions[0], questions[1 % len(questions)]
        yield [
            {"role": "user", "content": tokenizer.decode(ids) + "\n\n" + first["question"]},
            {"role": "assistant", "content": str(first["answer"])},
            {"role": "user", "content": second["question"]},
        ]


def build_prompts(data: Path, tokenizer: Any, count: int) -> list[list[int]]:
    """``count`` token prompts: about a sixth of them long."""
    long = max(1, count // 9)
    chats = [*conversations(data, count - long), *documents(data, tokenizer, long)]
    return [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in chats]


# -- reference


def reference(model: str, prompts: list[list[int]], new_tokens: int, path: Path) -> list[dict[str, Any]]:
    """Greedy tokens and the gap between the two best logits at each, from transformers; kept in ``path``."""

    def answer_all() -> list[dict[str, Any]]:
        source, answers = Reference(model), []
        for prompt in prompts:
            answers.append(dict(zip(("tokens", "gaps"), source.answer(prompt, new_tokens), strict=True)))
            print(f"reference {len(answers)}/{len(prompts)}", end="\r", file=sys.stderr, flush=True)
        return answers

    return list(remembered(path, {"model": model, "prompts": prompts, "new_tokens": new_tokens}, answer_all))


# -- comparison


def compare(tokens: list[int], want: dict[str, Any]) -> str:
    """``equal``, ``tie`` or a description of the first difference."""
    for i, (a, b) in enumerate(zip(tokens, want["tokens"], strict=False)):
        if a != b:
            gap = want["gaps"][i]
            return "tie" if gap <= TIE_LOGITS else f"token {i}: {a} instead of {b} (gap {gap:.2e})"
    if len(tokens) != len(want["tokens"]):
        return f"{len(tokens)} tokens instead of {len(want['tokens'])}"
    return "equal"


def run(setting: Setting, model: str, prompts: list[list[int]], want: list[dict[str, Any]], new: int) -> dict[str, Any]:
    """Run one setting; returns each sequence's verdict, the counters that must have grown, and the seconds."""
    from memserve import LLM, SamplingParams

    started = time.perf_counter()
    with LLM(model, dtype="float32", **setting.options) as llm:
        for _ in range(1 + setting.warm):
            results = llm.generate(prompts, SamplingParams(temperature=0.0), max_tokens=new, n=setting.n)
        stats = llm.stats().instance
    verdicts = [compare(list(o.tokens), want[i]) for i, r in enumerate(results) for o in r.outputs]
    wrong = [f"prompt {i // setting.n}: {v}" for i, v in enumerate(verdicts) if v not in ("equal", "tie")]
    idle = [name for name in setting.must if not attrgetter(name)(stats)]
    return {
        "setting": setting.name,
        "equal": verdicts.count("equal"),
        "ties": verdicts.count("tie"),
        "wrong": wrong,
        "did_not_happen": idle,
        "sequences": len(verdicts),
        "seconds": round(time.perf_counter() - started, 1),
        "counters": {name: attrgetter(name)(stats) for name in setting.must},
    }


def main() -> None:
    """Run the chosen settings and print one line for each."""
    args = options(
        __doc__, required="data reference_model", data=(Path, "folder with conversations/ and longdocs/"),
        model=("smollm2-135m-instruct", "what memserve loads"), new_tokens=32, prompts=72,
        reference_model=(str, "what transformers loads: a folder or a .gguf file"),
        reference=Path("build/lossless-reference.json"), only_reference=False,
        settings=("", "comma-separated parts of setting names; default: all"),
    )  # fmt: skip
    prompts = build_prompts(need(args.data), load_tokenizer(args.reference_model), args.prompts)
    lengths = sorted(map(len, prompts))
    long = sum(length >= 2000 for length in lengths)
    print(f"{len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens, {long} of 2,000 and more")
    want = reference(args.reference_model, prompts, args.new_tokens, args.reference)
    if args.only_reference:
        return
    rows, parts = [], [part for part in args.settings.split(",") if part]
    for setting in settings(block_bytes=23040 * 2 * 32, longest_tokens=lengths[-1]):
        if not parts or any(part in setting.name for part in parts):
            rows.append(run(setting, args.model, prompts, want, args.new_tokens))
            print(json.dumps(rows[-1]), flush=True)
    save(args, rows)
    sys.exit(any(row["wrong"] or row["did_not_happen"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
