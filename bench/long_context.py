"""A context that KV memory does not hold: its layers stream from DRAM, or from a file, beside the limit of the link.

    python bench/long_context.py [--tokens 4500] [--times 3] [--answer 33] [--folder /mnt/nvme0] [--link-gbps 8]

One prompt and its answer, with KV memory for all of it (``none`` below) and for a ``--times``-th part, with the rest in
DRAM, in DRAM behind an emulated link, and in a file (``--folder``). All engines are there at once and answer in turns;
the prompt is computed in the first round, and its prefix cached. Printed: whether the tokens are those of the first;
tokens a second (the median step of all rounds); bytes that a step reads back; what copies of the same pages alone
carry, by the same code; the tokens a second that this allows; and what is reached of the lower of both limits, that and
the first row's tokens a second. Steps are timed by the wall clock: nothing else should run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from harness.flags import options, save
from harness.rounds import turns
from harness.tables import show

from memserve import LLM
from memserve.base.types import KVGeometry, Tier
from memserve.base.units import GIB, NS_PER_S
from memserve.model.arena import ArenaSizes, KvArenas
from memserve.model.copier import Copy, PageCopier

COLUMNS = {
    "KV below": "{name}", "tokens of KV memory": "{hbm_tokens:,}", "equal": "{equal}", "tokens/s": "{tokens_s:.1f}",
    "MB read a step": "{step_mb:.1f}", "copies alone [GB/s]": "{copy_gb_s:.2f}",
    "link allows [tokens/s]": "{limit_tokens_s:.1f}", "of the limit": "{share:.0%}",
}  # fmt: skip


def main() -> None:
    args = options(
        __doc__, tokens=(4500, "of the prompt"), times=(3, "what the context is of KV memory"), rounds=3,
        answer=(33, "tokens of the answer"), folder=Path, link_gbps=(8.0, "of the emulated link"), dtype="bfloat16",
        model="smollm2-135m-instruct", threads=1,
    )  # fmt: skip
    with ExitStack() as stack:
        folder = args.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="memserve-kv-"))
        rows = measure(args, Path(folder), stack)
    show(rows, COLUMNS)
    save(args, {"rows": rows})


def measure(args: Any, folder: Path, stack: ExitStack) -> list[dict[str, Any]]:
    """A row for each place of the KV."""
    same = {"model": args.model, "dtype": args.dtype, "threads": args.threads}
    whole = stack.enter_context(LLM(**same, kv_memory="1GiB"))
    geometry, context = whole.model.geometry, args.tokens + args.answer
    hbm_bytes = context // args.times // geometry.block_tokens * geometry.block_bytes
    little = same | {"kv_memory": f"{hbm_bytes}B", "layerwise": "auto"}
    file = {"dram_memory": "0B", "kv_ssd": f"{folder}=1GiB"}
    sides = {
        "none": whole,
        "DRAM": stack.enter_context(LLM(**little, dram_memory="1GiB")),
        f"DRAM, {args.link_gbps:g} Gbit/s": stack.enter_context(
            LLM(**little, dram_memory="1GiB", link_gbps=args.link_gbps)
        ),
        "file": stack.enter_context(LLM(**little, **file)),
    }
    tokens = np.random.default_rng(1).integers(1000, 40000, args.tokens).tolist()
    steps: dict[str, list[float]] = {name: [] for name in sides}
    read: dict[str, list[float]] = {name: [] for name in sides}
    answers: dict[str, tuple[int, ...]] = {}
    for _, name in turns(args.rounds, sides):
        answers[name], spent, read_bytes = answer(sides[name], tokens, args.answer)
        steps[name] += spent
        read[name].append(read_bytes)
    copied = {
        "DRAM": copy_rate(geometry, context, None), "file": copy_rate(geometry, context, folder),
        f"DRAM, {args.link_gbps:g} Gbit/s": args.link_gbps * 1e9 / 8,
    }  # fmt: skip
    rows = []
    for name in sides:
        row = {
            "name": name,
            "hbm_tokens": hbm_bytes // geometry.token_bytes if name != "none" else GIB // geometry.token_bytes,
        }
        row |= {
            "tokens_s": 1 / statistics.median(steps[name]),
            "equal": "yes" if answers[name] == answers["none"] else "NO",
        }
        if name in copied:
            step_bytes = statistics.median(read[name])
            limit = copied[name] / step_bytes
            share = row["tokens_s"] / min(limit, rows[0]["tokens_s"])
            row |= {
                "step_mb": step_bytes / 1e6,
                "copy_gb_s": copied[name] / 1e9,
                "limit_tokens_s": limit,
                "share": share,
            }
        rows.append(row)
    return rows


def answer(llm: LLM, tokens: list[int], count: int) -> tuple[tuple[int, ...], list[float], float]:
    """Its tokens, seconds of each step behind the first token, and bytes that such a step read back."""
    times: list[float] = []
    read: list[int] = []

    def note() -> None:
        times.append(time.perf_counter())
        read.append(llm._engine.stats().instance.layers.link.up_bytes)

    output = llm.generate([tokens], max_tokens=count, ignore_eos=True, temperature=0.0, on_progress=note)[0]
    return tuple(output.outputs[0].tokens), np.diff(times).tolist(), float(np.median(np.diff(read)))


def copy_rate(geometry: KVGeometry, context: int, folder: Path | None) -> float:
    """Bytes a second of the copies that a step makes, layer by layer, and nothing beside them."""
    blocks, layers = context // geometry.block_tokens, geometry.num_layers
    frames = -(-blocks // layers)
    below = (blocks, 0, "") if folder is None else (0, blocks, str(folder))
    arenas = KvArenas(ArenaSizes(geometry.block_bytes, 2 * frames, *below, layers))
    arenas.hbm[:], copier = 1, PageCopier()
    page_bytes, ends = geometry.page_bytes, (arenas.hbm_address, arenas.dram.data_ptr())
    entries = np.arange(blocks, dtype=np.int32)
    buffers = [entries + buffer * frames * layers for buffer in range(2)]
    for layer in range(layers):
        down = Copy(*ends, buffers[0], entries * layers + layer, page_bytes, Tier.DRAM, file=arenas.file)
        copier.start_copy(down, urgent=True)
        copier.wait_for(down)
    rates = []
    for _ in range(5):
        began = time.perf_counter_ns()
        copies = [
            Copy(*ends[::-1], entries * layers + layer, buffers[layer % 2], page_bytes, Tier.HBM, file=arenas.file)
            for layer in range(layers)
        ]
        for copy in copies:
            copier.start_copy(copy, urgent=True)
        for copy in copies:
            copier.wait_for(copy)
        rates.append(blocks * geometry.block_bytes / (time.perf_counter_ns() - began) * NS_PER_S)
    copier.close()
    return statistics.median(rates)


if __name__ == "__main__":
    main()
