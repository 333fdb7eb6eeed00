"""Are answers of multi-turn sessions through a real cluster token-identical to transformers' ``generate``?

    python bench/cluster_lossless.py --data DIR --reference-model FOLDER_OR_GGUF [--settings 1P1D,nixl] [--sessions 12]

Sessions of six turns and long documents with two questions each, greedy, float32, over HTTP with the official client,
several sessions at once. The reference is computed once and cached in ``--reference``. One line per setting: how many
answers are equal, and what the cluster did (tokens reused, bytes moved); the exit status is 1 if any answer differs or
if something that the setting tests did not happen.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.chats import Session, chat_sessions, document_sessions, load_tokenizer, reference_answers
from harness.clients import ask_all
from harness.flags import need, options, save
from harness.processes import metric_sum
from harness.served import serving

CLIENTS = 4
ROOMY = ("--kv-memory", "1GiB")


@dataclass(frozen=True)
class Setting:
    """Options of ``memserve serve``, and counters of ``/metrics`` (sums over instances) that must have grown."""

    name: str
    options: tuple[str, ...]
    must: tuple[str, ...] = ()
    in_rounds: bool = False
    """All sessions have their first turn, then all their second: prefixes are evicted in between."""


def roles(prefill: int, decode: int, colocated: int) -> tuple[str, ...]:
    """Numbers of instances as options."""
    return ("--prefill", str(prefill), "--decode", str(decode), "--colocated", str(colocated))


def degrees(prefill: int, decode: int) -> tuple[str, ...]:
    """Workers of an instance, by role."""
    return ("--prefill-tensor-parallel", str(prefill), "--decode-tensor-parallel", str(decode))


def settings(small: str) -> list[Setting]:
    """Every setting of the evaluation; ``small`` is a KV memory that holds about two of the longest prompts."""
    pulled, cached = ("memserve_instance_received_bytes_total",), ("memserve_instance_cached_tokens_total",)
    from_dram = (*pulled, "memserve_instance_received_dram_bytes_total")
    pd, cramped = roles(1, 1, 0), ("--kv-memory", small, "--dram-memory", "2GiB", "--policy", "least-load")
    by_layer = (*pd, "--kv-memory", small, "--dram-memory", "2GiB", "--layerwise", "auto")
    turns = "memserve_instance_layerwise_turns_total"
    drafts = "memserve_instance_drafts_kept_total"
    tensor, stages = ("--tensor-parallel", "2"), ("--pipeline-parallel", "2")
    stored = ("memserve_instance_store_blocks_taken_total", "memserve_instance_store_tokens_total")
    memory_flags = ("--kv-memory", small, "--policy", "least-load", "--store-dram", "2GiB")
    taken_over, handed = f'{turns}{{turn="taken_over_parked"}}', f'{turns}{{turn="handed_over"}}'
    return [
        Setting("colocated, caching off", (*roles(0, 0, 1), "--caching", "off", *ROOMY)),
        Setting("colocated, caching on", (*roles(0, 0, 1), *ROOMY), cached),
        Setting("two colocated", (*roles(0, 0, 2), *ROOMY), cached),
        Setting("1P1D, caching off", (*pd, "--caching", "off", *ROOMY), pulled),
        *(Setting(f"1P1D, pd-caching-{n}", (*pd, "--caching", f"pd-caching-{n}", *ROOMY), pulled) for n in (1, 2, 3)),
        Setting("2P1D", (*roles(2, 1, 0), *ROOMY), pulled),
        Setting("1P2D", (*roles(1, 2, 0), *ROOMY), pulled),
        *(Setting(f"1P1D, {mode}", (*pd, "--transfer", mode, *ROOMY), pulled) for mode in ("by-layer", "by-request")),
        *(
            Setting(f"1P1D, {mode}, nixl", (*pd, "--transfer", mode, "--link", "nixl", *ROOMY), pulled)
            for mode in ("by-layer", "by-request", "by-request-agg")
        ),
        Setting("1P1D, KV by layer", by_layer, (*pulled, handed, taken_over)),
        Setting("1P1D, KV by layer, nixl", (*by_layer, "--link", "nixl"), (*pulled, handed, taken_over)),
        Setting("drafts", (*roles(0, 0, 1), "--draft-tokens", "8", *ROOMY), (*cached, drafts)),
        Setting("drafts, 1P1D", (*pd, "--draft-tokens", "8", *ROOMY), (*pulled, drafts)),
        *(
            Setting(f"workers: {name}", (*roles(0, 0, 1), *parallel, *ROOMY), cached)
            for name, parallel in (("TP 2", tensor), ("TP 3", ("--tensor-parallel", "3")), ("PP 2", stages))
        ),
        Setting("workers: TP 2 x PP 2", (*roles(0, 0, 1), *tensor, *stages, *ROOMY), cached),
        Setting("degrees: prefill TP 1, decode TP 2", (*pd, *degrees(1, 2), *ROOMY), pulled),
        Setting("degrees: prefill TP 2, decode TP 1", (*pd, *degrees(2, 1), *ROOMY), pulled),
        Setting("degrees: prefill TP 2, decode TP 3", (*pd, *degrees(2, 3), *ROOMY), pulled),
        Setting("degrees: PP 2", (*pd, "--pipeline-parallel", "2", *ROOMY), pulled),
        Setting(
            "degrees: TP 2 and TP 1 on a store",
            (*roles(2, 1, 0), *degrees(2, 1), *memory_flags),
            stored,
            in_rounds=True,
        ),
        Setting("degrees: TP 2 and TP 1, KV by layer", (*by_layer, *degrees(2, 1)), (*pulled, handed, taken_over)),
        Setting("2P1D, DRAM sources", (*roles(2, 1, 0), *cramped), from_dram, in_rounds=True),
        Setting("2P1D, DRAM sources, nixl", (*roles(2, 1, 0), *cramped, "--link", "nixl"), from_dram, in_rounds=True),
    ]


def play(session: Session, url: str, model: str, new_tokens: int, turns: int = 1 << 30) -> Session:
    """Play up to ``turns`` turns of one session, one after the other."""
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600) as client:
        end = len(session.answers) + turns
        while not session.done and len(session.answers) < end:
            completion = client.chat.completions.create(
                model=model, messages=session.messages(), temperature=0, max_tokens=new_tokens
            )
            session.answers.append(completion.choices[0].message.content or "")
    return session


def run(setting: Setting, sessions: list[Session], want: dict[str, list[str]], args: Namespace) -> dict[str, Any]:
    """Play all sessions against one cluster, and compare the answers."""
    started = time.perf_counter()
    with serving("--dtype", "float32", *setting.options, model=args.model) as server:
        played, turns = [session.fresh() for session in sessions], 1 if setting.in_rounds else args.turns
        while any(not session.done for session in played):
            ask_all(lambda session: play(session, server.url, server.model, args.new_tokens, turns), played, CLIENTS)
        metrics = server.metrics()
        status, _ = server.stop()
    pairs = [
        (session.name, turn, answer, want[session.name][turn])
        for session in played
        for turn, answer in enumerate(session.answers)
    ]
    wrong = [
        f"{name} turn {turn}: {answer!r} instead of {right!r}" for name, turn, answer, right in pairs if answer != right
    ]
    moved = {name.removeprefix("memserve_"): int(metric_sum(metrics, name)) for name in setting.must}
    return {
        "setting": setting.name, "answers": len(pairs), "equal": len(pairs) - len(wrong), "wrong": wrong[:5],
        "did_not_happen": [name for name, count in moved.items() if not count], "moved": moved, "exit_status": status,
        "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip


def main() -> None:
    """Run the chosen settings and print one line for each."""
    args = options(
        __doc__, required="data reference_model", data=(Path, "folder with conversations/ and longdocs/"), model="",
        reference_model=(str, "what transformers loads: a folder or a .gguf file"),
        reference=Path("build/cluster-reference.json"), sessions=12, documents=8, turns=6, new_tokens=32,
        settings=("", "semicolon-separated parts of setting names; default: all"),
    )  # fmt: skip
    data, tokenizer = need(args.data), load_tokenizer(args.reference_model)
    sessions = chat_sessions(data, args.sessions, args.turns)
    sessions += document_sessions(data, tokenizer, args.documents, 2000)
    want = reference_answers(args.reference_model, sessions, args.new_tokens, args.reference)
    rows, parts = [], [part for part in args.settings.split(";") if part]
    for setting in settings(small="192MiB"):
        if not parts or any(part in setting.name for part in parts):
            rows.append(run(setting, sessions, want, args))
            print(json.dumps(rows[-1]), flush=True)
    save(args, rows)
    sys.exit(any(row["wrong"] or row["did_not_happen"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
