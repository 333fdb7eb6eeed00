"""A tiny model served end to end, beside transformers on the same device: one engine with and without graphs, with KV
in both tiers, and clusters of two instances. Parts of ``scripts/gpu_check.py``; without a CUDA device they run on the
CPU, where there are no graphs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gpu_attention import ROOT
from gpu_report import CODED, KINDS, NotRun, Row, has_device, need_device

sys.path.insert(0, str(ROOT / "tests" / "support"))

DEVICE = "cuda" if has_device() else "cpu"
PROMPTS, NEW_TOKENS = 6, 32
ANSWER_S, TOLD_S, END_S = 60.0, 10.0, 20.0
SWAPPED_BLOCKS, LAYERED_BLOCKS = 12, 40
"""KV memory that holds some of the prompts with their answers, and not all: blocks of 32 tokens, of 8 tokens."""

RECEIVED, GENERATED = "memserve_instance_received_bytes_total", "memserve_instance_generated_tokens_total"
CLUSTERS: dict[str, tuple[str, ...]] = {
    "1 prefill, 1 decode": ("--prefill", "1", "--decode", "1"),
    "1 prefill, 1 decode, by layer": ("--prefill", "1", "--decode", "1", "--transfer", "by-layer"),
    "two colocated": ("--colocated", "2", "--policy", "least-load"),
}


@cache
def folder(kind: str = "llama") -> Path:
    """The tiny model of a kind, as a folder."""
    from tiny_models import save_folder, tiny_module

    family, sizes = KINDS.get(kind, (kind, {}))
    saved: Path = save_folder(tiny_module(family, **sizes), Path(tempfile.mkdtemp()) / kind)
    return saved


def prompts() -> list[list[int]]:
    """Of different lengths, within two blocks and beyond four."""
    from tiny_models import prompt

    return [[int(token) for token in prompt(40 + 17 * number, number)] for number in range(PROMPTS)]


@cache
def truth(dtype: str, kind: str = "llama") -> list[list[int]]:
    """What transformers' ``generate`` gives on the same device, greedily, with the family's own attention."""
    from transformers import AutoModelForCausalLM

    options: Any = {"dtype": getattr(torch, dtype), "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder(kind), **options).to(DEVICE)
    model.generation_config.eos_token_id = None
    answers_found = []
    for tokens in prompts():
        ids = torch.tensor([tokens], device=DEVICE)
        out = model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
        answers_found.append(out[0, len(tokens) :].tolist())
    return answers_found


def answers(llm: Any, *, at_once: bool = True) -> list[list[int]]:
    """What an engine gives, to all prompts at once or one after the other."""
    batches = [prompts()] if at_once else [[prompt_tokens] for prompt_tokens in prompts()]
    options = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    return [list(result.outputs[0].tokens) for batch in batches for result in llm.generate(batch, **options)]


@contextmanager
def engine(dtype: str = "float32", kind: str = "llama", **options: Any) -> Iterator[Any]:
    """An engine with the tiny model of a kind."""
    from memserve import LLM

    with LLM(str(folder(kind)), **{"dtype": dtype, "device": DEVICE, "kv_memory": "16MiB", **options}) as llm:
        yield llm


def compared(title: str, answers: list[list[int]], dtype: str = "float32", kind: str = "llama", **more: object) -> Row:
    """How many answers are those of transformers; in 16 bits sums are rounded otherwise, so that they may differ."""
    equal = sum(answer == expected for answer, expected in zip(answers, truth(dtype, kind), strict=True))
    row: Row = {"what": title, "equal": f"{equal} of {len(answers)}", **more}
    return row | ({"ok": equal == len(answers)} if dtype == "float32" else {})


def one_engine() -> Iterator[Row]:
    """Greedy tokens, alone and together, by chunks, with and without a cached prefix: those of transformers."""
    for dtype in ("float32", "bfloat16"):
        with engine(dtype, max_step_tokens=64) as llm:
            yield compared(f"{dtype}, one after the other", answers(llm, at_once=False), dtype)
            yield compared(f"{dtype}, all at once, prefixes cached", answers(llm), dtype)
            cached = llm.stats().instance.cached_tokens
            yield {"what": f"{dtype}, prefixes came from the cache", "ok": cached > 0, "tokens": cached}


def one_kind(kind: str) -> Iterator[Row]:
    """As :func:`one_engine` for another kind of model; and whether its decodes fit into graphs."""
    for dtype in ("float32", "bfloat16"):
        with engine(dtype, kind, max_step_tokens=64) as llm:
            yield compared(f"{dtype}, one after the other", answers(llm, at_once=False), dtype, kind)
            yield compared(f"{dtype}, all at once, prefixes cached", answers(llm), dtype, kind)
            if DEVICE == "cuda":
                device = llm._engine._instance._device
                forward, graphs = type(device._forward).__name__, device._graphs
                graph_facts = {"graphs": len(device.graph_sizes), "why": graphs.refused or "all fit"}
                yield {"what": f"{dtype}, decodes", "forward": forward, **graph_facts}


def graphs() -> Iterator[Row]:
    """Decode steps with graphs and kernel by kernel: equal tokens, and what a step takes."""
    need_device()
    with engine() as llm:
        device = llm._engine._instance._device
        yield {"what": "captured", "ok": bool(device.graph_sizes), "rows": device.graph_sizes}
        captured = device._graphs
        for label, graphs_used in (("with graphs", captured), ("kernel by kernel", None)):
            device._graphs = graphs_used
            answers(llm)  # compiles what it needs
            began, before = time.perf_counter(), llm.stats().steps
            tokens_got = answers(llm)
            steps = llm.stats().steps - before
            yield compared(label, tokens_got, ms_a_step=(time.perf_counter() - began) * 1e3 / max(1, steps))


def tiers() -> Iterator[Row]:
    """KV that is swapped out and in again, and prompts whose layers lie apart: the same tokens."""
    with engine() as llm:
        block = llm.model.geometry.block_bytes
    for mode in ("swap", "recompute"):
        with engine(kv_memory=SWAPPED_BLOCKS * block, dram_memory="16MiB", preemption=mode) as llm:
            tokens_got, stats = answers(llm), llm.stats().instance
            yield compared(f"too little memory, {mode}", tokens_got)
            count = stats.preemptions_swap if mode == "swap" else stats.preemptions_recompute
            yield {"what": f"{mode} has happened", "ok": count > 0, "times": count}
    link = {"link_gbps": 1.0} if DEVICE == "cpu" else {}  # a GPU has a link of its own
    small = {"kv_memory": LAYERED_BLOCKS * block // 4, "block_tokens": 8, "max_step_tokens": 16}
    with engine(**small, **link, dram_memory="16MiB", layerwise="auto", enable_prefix_caching=False) as llm:
        with ThreadPoolExecutor(PROMPTS) as pool:
            options = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
            futures = [pool.submit(llm.generate, [prompt_tokens], **options) for prompt_tokens in prompts()]
            tokens_got = [list(future.result()[0].outputs[0].tokens) for future in futures]
        layers = llm.stats().instance.layers
        yield compared("KV by layer", tokens_got)
        hidden = {"hidden_share": layers.link.hidden_share}
        yield {"what": "prompts began by layer", "ok": layers.begun > 0, "times": layers.begun, **hidden}


def coded() -> Iterator[Row]:
    """KV of a byte or less, alone and at once, too little of it: the tokens of an engine on the CPU, which rounds the
    same. A number whose last bits differ there may have another code, so that one answer may differ."""
    for kind in CODED:
        with engine(kv_dtype=kind, device="cpu") as llm:
            block, expected = llm.model.geometry.block_bytes, answers(llm, at_once=False)
        small = {"kv_memory": SWAPPED_BLOCKS * block, "dram_memory": "16MiB", "preemption": "swap"}
        for title, at_once, options in (("one after the other", False, {}), ("too little memory", True, small)):
            with engine(kv_dtype=kind, **options) as llm:
                pairs = zip(answers(llm, at_once=at_once), expected, strict=True)
                equal, swaps = sum(answer == right for answer, right in pairs), llm.stats().instance.preemptions_swap
            row = {"what": f"{kind}, {title}", "equal": f"{equal} of {PROMPTS}", "swaps": swaps}
            yield row | {"ok": equal >= PROMPTS - 1 and (swaps > 0) == at_once}


def workers() -> Iterator[Row]:
    """Instances of two workers, each on a GPU of its own (on a CPU: two processes), with KV that is swapped: the tokens
    of one."""
    if DEVICE == "cuda" and torch.cuda.device_count() < 2:
        raise NotRun("an instance of two workers needs two GPUs, and one is here")
    with engine() as llm:
        block = llm.model.geometry.block_bytes
    for name, degrees in {"TP 2": {"tensor_parallel": 2}, "PP 2": {"pipeline_parallel": 2}}.items():
        with engine(**degrees) as llm:
            yield compared(f"{name}, all at once", answers(llm))
            sizes = getattr(llm._engine._instance._device._leader, "graph_sizes", [])
            yield {"what": f"{name}, graphs", "rows": sizes} | ({"ok": bool(sizes)} if DEVICE == "cuda" else {})
        small = {"kv_memory": SWAPPED_BLOCKS * block, "dram_memory": "16MiB", "preemption": "swap"}
        with engine(**degrees, **small) as llm:
            yield compared(f"{name}, too little memory", answers(llm))
            count = llm.stats().instance.preemptions_swap
            yield {"what": f"{name}, KV was swapped", "ok": count > 0, "times": count}


def clusters() -> Iterator[Row]:
    """Two instances on one card, over HTTP: the same text, and KV that went from one to the other."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder())
    want = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in truth("float32")]
    for name, flags in CLUSTERS.items():
        with serving(*flags) as url, ThreadPoolExecutor(PROMPTS) as pool:
            texts_got = list(pool.map(lambda tokens, url=url: asked(url, tokens), prompts()))
            equal = sum(text == expected for text, expected in zip(texts_got, want, strict=True))
            yield {"what": f"{name}: answers", "ok": equal == len(texts_got), "equal": f"{equal} of {len(texts_got)}"}
            counter, claim, least = (
                (RECEIVED, "KV was pulled", 1) if "--prefill" in flags else (GENERATED, "both answer", 2)
            )
            counts = of_instances(url, counter, least)
            yield {"what": f"{name}: {claim}", "ok": sum(map(bool, counts.values())) >= least, "by_instance": counts}


def of_instances(url: str, name: str, least: int) -> dict[str, int]:
    """A counter by instance, as soon as it is above 0 at ``least`` instances: instances tell it once a second."""
    deadline = time.monotonic() + TOLD_S
    while True:
        with urllib.request.urlopen(f"{url}/metrics", timeout=ANSWER_S) as answer:
            page = answer.read().decode()
        rows = re.findall(rf'^{name}{{[^}}]*instance="(\w+)"[^}}]*}} (\S+)$', page, re.M)
        counts = {instance: int(float(value)) for instance, value in rows}
        if sum(map(bool, counts.values())) >= least or time.monotonic() > deadline:
            return counts
        time.sleep(0.2)


def asked(url: str, tokens: list[int]) -> str:
    """The answer to one prompt over HTTP."""
    body = {"model": folder().name, "prompt": tokens, "temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        return str(json.load(answer)["choices"][0]["text"])


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """The address of a ``memserve serve``, which ends with the block."""
    command = [
        sys.executable, "-m", "memserve", "serve", "--model", str(folder()), "--dtype", "float32", "--device", DEVICE,
        "--kv-memory", "16MiB", "--port", "0", *flags,
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:  # the part's own limit ends a start that never comes to an end
                if ready := re.match(r"ready in .* at (\S+)/v1", line):
                    yield ready.group(1)
                    return
            log.seek(0)
            raise RuntimeError(f"memserve serve ended with {process.wait(END_S)}: {log.read()[-2000:]}")
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
