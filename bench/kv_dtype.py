"""What ``--kv-dtype`` saves, and what it costs in answers: KV as codes in the tier that attention reads.

    python bench/kv_dtype.py [--data DIR] [--documents 20] [--tokens 1024] [--rounds 9] [--model FOLDER] [--dtype D]
        [--only memory,attention,steps,quality] [--isa avx2]

* memory: bytes of a token, and sequences of 1,024 tokens in the default ``--kv-memory``;
* attention: CPU time of one thread for a decode over all layers, KV read once, and for a chunk of a prompt; contenders
  in turns, medians of the rounds. Of ``llama3`` 8 of the 32 layers;
* steps: CPU time of one thread for whole steps of the model that decode a token;
* quality: perplexity, and how often the most probable token is that of ``auto``, over the second half of each document:
  computed in chunks of 512, and token by token.

``--data`` has ``longdocs/``, as for ``lossless.py``; without it documents are made from a seed, whose text has no
meaning.
"""

from __future__ import annotations

import itertools
import math
import mmap
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.chats import document_texts
from harness.flags import Commas, options, save
from harness.rounds import Samples, mean, turns
from harness.tables import Table
from lower_dtype import Document

from memserve import _kernels
from memserve.base.config import EngineOptions
from memserve.base.types import KV_DTYPES, KVGeometry
from memserve.base.units import MIB
from memserve.host.build import build_parts
from memserve.model.device import ModelDevice

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from geometries import SHAPES

PARTS = ("memory", "attention", "steps", "quality")
LAYERS = {"smollm2": 30, "llama3": 8}
QUERY_HEADS = {"smollm2": 9, "llama3": 32}
STEPS = ((2048, 1), (8192, 1), (2048, 512))
"""(context, new tokens) of the attention that is measured."""
CHUNK = 512

MEMORY = {
    "KV": "{kv}", "geometry": "{geometry}", "bytes a token": "{token_bytes:,}", "of auto": "{share:.1%}",
    "sequences of 1,024 tokens in 384 MiB": "{sequences}",
}  # fmt: skip
ATTENTION = {
    "KV": "{kv}", "geometry": "{geometry}", "context": "{context:,}", "new": "{count}", "CPU ms": "{ms:.2f}",
    "times as fast as auto": "{faster:.2f}",
}  # fmt: skip
STEP = {"KV": "{kv}", "context": "{context:,}", "CPU ms a token": "{ms:.2f}", "times as fast as auto": "{faster:.2f}"}
QUALITY = {
    "KV": "{kv}", "computed": "{way}", "perplexity": "{perplexity:.4f}", "more than auto": "{more:+.3%}",
    "most probable token as of auto": "{best:.2%}",
}  # fmt: skip


def memory() -> Iterator[dict[str, Any]]:
    """What a token takes."""
    for name in LAYERS:
        plain = SHAPES[name].kv
        for kv in KV_DTYPES:
            shape = replace(plain, kv_dtype=kv)
            blocks = EngineOptions().kv_memory_bytes // shape.block_bytes
            yield {
                "kv": kv, "geometry": name, "token_bytes": shape.token_bytes,
                "share": shape.block_bytes / plain.block_bytes, "sequences": blocks // (1024 // shape.block_tokens),
            }  # fmt: skip


class Attention:
    """All layers of one step of one sequence."""

    def __init__(self, name: str, kv: str, context: int, count: int) -> None:
        g = replace(SHAPES[name].kv, num_layers=LAYERS[name], kv_dtype=kv)
        self.geometry, self.heads = g, QUERY_HEADS[name]
        blocks = -(-context // g.block_tokens)
        mapping = mmap.mmap(-1, blocks * g.block_bytes)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        self.arena = torch.frombuffer(mapping, dtype=torch.uint8)
        self.table = np.random.default_rng(0).permutation(blocks).astype(np.int32)[None]
        self.random = torch.Generator().manual_seed(0)
        # a window of one token: its K and V are written, and hardly anything is attended to
        self.batch = self._batch(g, context, context)
        self.run(self._tensors(context), window=1)
        self.batch = self._batch(g, context, count)
        self.tensors = self._tensors(count)

    def _batch(self, g: KVGeometry, context: int, count: int) -> _kernels.PagedBatch:
        shape = (g.num_layers, g.num_kv_heads, g.head_dim_k, g.head_dim_v, g.block_tokens, g.dtype, g.kv_dtype)
        ends = np.array([0, count], np.int32), np.array([context], np.int32)
        return _kernels.PagedBatch(self.arena.data_ptr(), shape, self.table, np.zeros(1, np.int32), *ends)

    def _tensors(self, count: int) -> list[torch.Tensor]:
        g = self.geometry
        kinds = (self.heads, g.head_dim_k), (g.num_kv_heads, g.head_dim_k), (g.num_kv_heads, g.head_dim_v)
        parts = [torch.randn(count, *kind, generator=self.random).to(torch.bfloat16) for kind in kinds]
        return [*parts, torch.empty(count, self.heads, g.head_dim_v, dtype=torch.bfloat16)]

    def run(self, tensors: list[torch.Tensor] | None = None, window: int = 0) -> None:
        addresses = [(t.data_ptr(), t.stride(0), t.stride(1)) for t in tensors or self.tensors]
        for layer in range(self.geometry.num_layers):
            _kernels.attend(self.batch, layer, self.heads, *addresses, self.geometry.head_dim_k**-0.5, window)


def in_turns(contenders: dict[str, Callable[[], None]], rounds: int) -> Samples:
    """CPU ms of this thread."""
    samples = Samples()
    for number, name in turns(rounds, contenders, warm=1):
        begin_ns = time.thread_time_ns()
        contenders[name]()
        if number >= 0:
            samples[name].append((time.thread_time_ns() - begin_ns) / 1e6)
    return samples


def attention(rounds: int) -> Iterator[dict[str, Any]]:
    """The kernel alone."""
    for name, (context, count) in itertools.product(LAYERS, STEPS):
        contenders = {kv: Attention(name, kv, context, count) for kv in KV_DTYPES}
        samples = in_turns({kv: each.run for kv, each in contenders.items()}, rounds)
        for kv in KV_DTYPES:
            row = {"kv": kv, "geometry": name, "context": context, "count": count, "ms": samples.median(kv)}
            yield row | {"faster": 1 / samples.ratio(kv, "auto")}


def device_of(args: Namespace, kv: str, kv_memory_bytes: int) -> tuple[ModelDevice, Any]:
    """A device with one thread, and its tokenizer."""
    options_given = {"model": args.model, "dtype": args.dtype, "threads": 1, "kv_dtype": kv, "quantization": "none"}
    parts = build_parts(EngineOptions(**options_given, kv_memory_bytes=kv_memory_bytes))
    return parts.device, parts.model.tokenizer


def steps(args: Namespace, text: str) -> Iterator[dict[str, Any]]:
    """Whole steps, behind contexts of the same text."""
    contexts = [context for context, count in STEPS if count == 1]
    documents: dict[str, Document] = {}
    for kv in KV_DTYPES:
        device, tokenizer = device_of(args, kv, 256 * MIB)
        longest = max(contexts)
        tokens = (tokenizer(text, add_special_tokens=False)["input_ids"] * longest)[: longest - 1]
        documents[kv] = Document(device, tokens, itertools.count(1))
        for start in range(0, len(tokens), CHUNK):
            documents[kv].compute(start, min(start + CHUNK, len(tokens)), tell=False)
    for context in contexts:

        def decode(kv: str, place: int = context - 2) -> None:
            documents[kv].compute(place, place + 1, tell=False)  # what lies behind it is not read

        samples = in_turns({kv: partial(decode, kv) for kv in KV_DTYPES}, 5 * args.rounds)
        for kv in KV_DTYPES:
            yield {"kv": kv, "context": context, "ms": samples.median(kv), "faster": 1 / samples.ratio(kv, "auto")}


def judged(device: ModelDevice, documents: list[list[int]], width: int) -> list[tuple[float, int]]:
    """Of the second halves: logprob of each token, and the most probable one; ``width`` tokens a step."""
    judgements = []
    for tokens in documents:
        document, half = Document(device, tokens, itertools.count(1)), len(tokens) // 2
        for start in range(0, half, CHUNK):
            document.compute(start, min(start + CHUNK, half), tell=False)
        for start in range(half, len(tokens), width):
            judgements += document.compute(start, min(start + width, len(tokens)), tell=True)
        document.close()
    return judgements


def quality(args: Namespace) -> Iterator[dict[str, Any]]:
    """What rounding does to the model's opinion of documents."""
    full: dict[str, list[tuple[float, int]]] = {}
    for kv in KV_DTYPES:
        device, tokenizer = device_of(args, kv, 64 * MIB)
        documents = [
            tokenizer(text, add_special_tokens=False)["input_ids"][: args.tokens]
            for text in document_texts(args.data, args.documents)
        ]
        for way, width in (("in chunks", CHUNK), ("token by token", 1)):
            judgements = judged(device, [tokens for tokens in documents if len(tokens) == args.tokens], width)
            right = full.setdefault(way, judgements)
            perplexity, base = (math.exp(-mean([logprob for logprob, _ in pair])) for pair in (judgements, right))
            yield {
                "kv": kv, "way": way, "tokens": len(judgements), "perplexity": perplexity,
                "more": perplexity / base - 1,
                "best": mean(a[1] == b[1] for a, b in zip(judgements, right, strict=True)),
            }  # fmt: skip
        device.close()


def main() -> None:
    args = options(
        __doc__, data=(Path, "folder with longdocs/; default: made from a seed"), documents=20,
        tokens=(1024, "of each document"), rounds=9, model=("smollm2-135m-instruct", "folder, file or name"),
        dtype="bfloat16", only=(Commas(*PARTS), "what is measured"),
        isa=(str, "the instruction set of attention; default: the widest"),
    )  # fmt: skip
    torch.set_num_threads(1)
    _kernels.force_isa(args.isa)
    print(f"isa {_kernels.isa()}, one thread; {args.documents} documents of {args.tokens} tokens")
    text, saved = document_texts(args.data, 1)[0], []
    parts: dict[str, tuple[dict[str, str], Callable[[], Iterator[dict[str, Any]]]]] = {
        "memory": (MEMORY, memory), "attention": (ATTENTION, lambda: attention(args.rounds)),
        "steps": (STEP, lambda: steps(args, text)), "quality": (QUALITY, lambda: quality(args)),
    }  # fmt: skip
    for part in args.only:
        columns, rows = parts[part]
        print()
        table = Table(columns)
        for row in rows():
            table.show(row)
            saved.append({"part": part, **row})
    save(args, saved)


if __name__ == "__main__":
    main()
