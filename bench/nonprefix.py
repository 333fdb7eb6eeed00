"""Reuse that is no prefix: the time to the first token, and what it costs in answers.

    python bench/nonprefix.py --data DIR [--prompts 40] [--chunk-tokens 384] [--shares 0,0.05,0.1,0.15,0.2]
        [--ways first,spread,deviation] [--compared 0.15] [--answer-tokens 24] [--dtype D] [--json FILE]

Retrieval with shuffled chunks: texts of ``DIR/longdocs`` are cut into chunks of ``--chunk-tokens``, at no border of
blocks. Each is computed once, five in a prompt in their own order behind a short instruction. Then each prompt has five
of one text's chunks in another order, and a question about it, and is asked in every way in turn:

* *prefix caching*: as without ``--nonprefix-reuse``; all but the instruction is computed. The reference.
* *without the chunks*: the instruction and the question alone: what the chunks are worth.
* *first*, *spread*, *deviation*, with a share: reuse, with that share of the tokens found computed anew; the second and
  third with ``--compared`` alone. ``first``: the first of each run (EPIC), which is what the product does. ``spread``:
  every n-th. ``deviation``: those whose values in the second layer differ most from those of the prompt computed whole
  (CacheBlend), found by computing just that, whose time is not counted.

TTFT: medians, and the median of the ratios to prefix caching, prompt by prompt. Perplexity: of the data's answers, and
of the reference's greedy ones. Equal: greedy answers of ``--answer-tokens`` tokens that are the reference's, and how
many of their tokens are, up to the first that is not. ``--prompts 0``: what the index of contents takes, alone.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import random
import time
import tracemalloc
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from harness.chats import DOCUMENT_FILES, read
from harness.flags import Commas, options, save
from harness.rounds import mean
from harness.tables import Table

from memserve.base.config import EngineOptions, SchedulerConfig
from memserve.base.types import Request, SamplingParams, StopParams, TokenArray, TokenOutput
from memserve.base.units import MIB
from memserve.host.build import build_parts
from memserve.host.engine import Engine, Rejected
from memserve.instance.scheduler.memory import SequenceMemory
from memserve.instance.scheduler.sequence import Sequence
from memserve.kv import contents
from memserve.kv.contents import ContentIndex, ContentReuse, Positions, Run, keep_all_but_first
from memserve.model.attention.context import step_attention
from memserve.model.loading.loader import load_model
from memserve.model.loading.probe import DenseAttention

Choice = Callable[[list[Run], float], list[Positions]]
"""Runs, and the share of their tokens that is computed anew -> the positions whose KV stays as it was copied."""
CHUNKS = 5
CHUNKS_FIRST = -1
"""The priority of requests whose KV is cached."""
PREFIX, BARE = "prefix caching", "without the chunks"
COLUMNS = {
    "way": "{way}", "computed anew": "{share:.0%}", "tokens reused": "{reused:.0f}", "TTFT": "{ttft_ms:.0f} ms",
    "of prefix caching": "{ratio:.2f}", "perplexity of the data's answers": "{data_perplexity:.2f}",
    "of the reference's": "{own_perplexity:.3f}", "answers equal": "{equal:.0%}", "tokens equal": "{prefix:.0%}",
}  # fmt: skip


@dataclass
class Question:
    """A prompt in its parts, and what the data answers."""

    head: list[int]
    chunks: list[list[int]]
    tail: list[int]
    answer: list[int]

    def prompt(self, more: list[int] | None = None) -> TokenArray:
        """All of it, with ``more`` behind."""
        tokens = [*self.head, *(token for chunk in self.chunks for token in chunk), *self.tail, *(more or [])]
        return np.array(tokens, np.int32)


@dataclass
class Outcome:
    """Of one prompt, asked in one way."""

    ttft_ms: float
    tokens: list[int]
    reused: int
    logprobs: dict[str, list[float]] = field(default_factory=dict)


class SequentialEngine:
    """An engine, asked one request after the other."""

    def __init__(self, args: Namespace) -> None:
        scheduler = SchedulerConfig(nonprefix_reuse=True)
        engine = EngineOptions(model=args.model, dtype=args.dtype, kv_memory_bytes=args.kv_mib * MIB, threads=1,
                               scheduler=scheduler)  # fmt: skip
        self.parts = build_parts(engine)
        self._engine = Engine(self.parts.machine, self.parts.device)
        self._number, self.block_tokens = 0, self.parts.model.geometry.block_tokens
        cached = self.parts.machine.state.memory.contents
        assert cached is not None, self.parts.machine.state.memory.why_no_contents
        self.contents: ContentReuse = cached

    def ask(self, prompt: TokenArray, tokens: int, **more: Any) -> list[TokenOutput]:
        """All that was answered, greedily."""
        self._number += 1
        self.began, self.first_at = time.perf_counter(), 0.0
        sampling = SamplingParams(temperature=0, prompt_logprobs=more.pop("scored", False))
        request = Request(f"bench-{self._number}", prompt, sampling, StopParams(max_tokens=tokens), **more)
        outputs: queue.SimpleQueue[TokenOutput | Rejected] = queue.SimpleQueue()
        self._engine.submit(request, outputs.put)
        answer: list[TokenOutput] = []
        while not answer or answer[-1].finish_reason is None:
            output = outputs.get()
            self.first_at = self.first_at or time.perf_counter()
            assert isinstance(output, TokenOutput), output
            answer.append(output)
        return answer

    def time_answer(self, prompt: TokenArray, tokens: int, **more: Any) -> Outcome:
        """One answer, and how soon its first token comes."""
        answer = self.ask(prompt, tokens, **more)
        drawn = [token for output in answer for token in output.tokens]
        return Outcome(1e3 * (self.first_at - self.began), drawn, answer[0].inexact_tokens)

    def score(self, prompt: TokenArray, answer: int, **more: Any) -> list[float]:
        """Log probabilities of the last ``answer`` tokens of ``prompt``."""
        (output, *_) = self.ask(prompt, 1, scored=True, **more)
        return [entry.logprob for entry in (output.prompt_logprobs or ())[-answer:] if entry is not None]

    def choose(self, choice: Choice, share: float) -> None:
        """How runs are computed anew from now on."""
        contents.keep_all_but_first, self.contents._share = choice, share


def keep_spread(runs: list[Run], share: float) -> list[Positions]:
    """Every n-th token is computed anew."""
    anew = {run.first + int((number + 0.5) / share) for run in runs for number in range(int(share * run.count))}
    return spans_of(runs, anew)


def spans_of(runs: list[Run], anew: set[int]) -> list[Positions]:
    """All positions of ``runs`` but those ``anew``."""
    spans: list[Positions] = []
    for position in (place for run in runs for place in range(run.first, run.end) if place not in anew):
        if spans and spans[-1][1] == position:
            spans[-1] = spans[-1][0], position + 1
        else:
            spans.append((position, position + 1))
    return spans


class Deviations:
    """Values of the second layer, of whole sequences."""

    class _Enough(Exception):
        pass

    class _SecondLayer(DenseAttention):
        values: torch.Tensor

        def run_attention(
            self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any
        ) -> torch.Tensor:
            self.values = v[0].float()
            if layer == 1:
                raise Deviations._Enough
            return super().run_attention(layer, q, k, v, **more)

    def __init__(self, args: Namespace) -> None:
        self._module = load_model(args.model, "float32", "cpu").module
        self._known: dict[bytes, torch.Tensor] = {}
        self.prompt: TokenArray = np.empty(0, np.int32)

    def begin_prompt(self, prompt: TokenArray) -> None:
        """Runs are those of ``prompt`` from now on."""
        self.prompt = prompt
        self.values_of(prompt)

    def values_of(self, tokens: TokenArray) -> torch.Tensor:
        """``[heads, tokens, head_dim]``."""
        key = tokens.tobytes()
        if key not in self._known:
            attention, ids = self._SecondLayer(), torch.from_numpy(tokens.astype(np.int64))
            with step_attention(attention), torch.inference_mode(), suppress(Deviations._Enough):
                self._module(input_ids=ids[None], position_ids=torch.arange(len(ids))[None], use_cache=False)
            self._known[key] = attention.values
        return self._known[key]

    def keep_alike(self, runs: list[Run], share: float) -> list[Positions]:
        """Those that differ most are computed anew."""
        own, gaps = self.values_of(self.prompt), {}
        for run in runs:
            there = self.values_of(run.source.tokens)[:, run.source_first : run.source_first + run.count]
            differences = (own[:, run.first : run.end] - there).square().sum((0, 2)).tolist()
            gaps |= dict(enumerate(differences, run.first))
        most = sorted(gaps, key=lambda place: -gaps[place])[: round(share * len(gaps))]
        return spans_of(runs, set(most))


def questions(args: Namespace, encode: Callable[[str], list[int]]) -> tuple[list[TokenArray], list[Question]]:
    """Prompts that compute all chunks, and those that are measured."""
    rng, before, measured = random.Random(args.seed), [], []
    head = encode("Answer the question from the text. Be brief.\n\nText:\n")
    records = [record for name in reversed(DOCUMENT_FILES) for record in read(args.data / name)]
    rng.shuffle(records)
    for record in records:
        text, size = encode(record["document"][: 8 * args.chunk_tokens * 2 * CHUNKS]), args.chunk_tokens
        chunks = [text[first : first + size] for first in range(0, len(text) - size + 1, size)][: 2 * CHUNKS]
        if len(chunks) < 2 * CHUNKS:
            continue
        for half in (chunks[:CHUNKS], chunks[CHUNKS:]):
            before.append(np.array([*head, *(token for chunk in half for token in chunk)], np.int32))
        asked = rng.choice(record["questions"])
        tail = encode(f"\n\nQuestion: {asked['question']}\nAnswer:")
        answer = encode(" " + asked["answer"])[: args.answer_tokens]
        measured.append(Question(head, rng.sample(chunks, CHUNKS), tail, answer))
        if len(measured) == args.prompts:
            break
    return before, measured


def ask_all(args: Namespace) -> Iterator[dict[str, Any]]:
    """A row for each way."""
    engine = SequentialEngine(args)
    tokenizer = engine.parts.model.tokenizer
    deviations = Deviations(args) if "deviation" in args.ways else None
    choices: dict[str, Choice] = {"first": keep_all_but_first, "spread": keep_spread}
    if deviations is not None:
        choices["deviation"] = deviations.keep_alike
    before, measured = questions(args, lambda text: tokenizer.encode(text, add_special_tokens=False))
    ways: list[tuple[str, float | None]] = [(PREFIX, None), (BARE, None)]
    ways += [(args.ways[0], share) for share in args.shares] + [(way, args.compared) for way in args.ways[1:]]
    outcomes: dict[tuple[str, float | None], list[Outcome]] = {way: [] for way in ways}
    halves = len(before) // len(measured)
    engine.ask(np.array(measured[0].head * 20, np.int32), 1)  # the first steps of a process are slower
    for number, question in enumerate(measured):
        for tokens in before[halves * number : halves * (number + 1)]:
            engine.ask(tokens, 1, priority=CHUNKS_FIRST)
            if deviations is not None:
                deviations.values_of(tokens[: len(tokens) // engine.block_tokens * engine.block_tokens])
        reference: list[int] = []
        for way in (ways[0], *random.Random(number).sample(ways[1:], len(ways) - 1)):
            asked = dataclasses.replace(question, chunks=[]) if way[0] == BARE else question
            more: dict[str, Any] = {} if way[1] is None else {"nonprefix_reuse": True}
            if way[1] is not None:
                engine.choose(choices[way[0]], way[1])
            if deviations is not None:
                deviations.begin_prompt(asked.prompt())
            outcome = engine.time_answer(asked.prompt(), args.answer_tokens, **more)
            reference = reference or outcome.tokens
            for name, answer in (("data", question.answer), ("own", reference)):
                if deviations is not None:
                    deviations.begin_prompt(asked.prompt(answer))
                outcome.logprobs[name] = engine.score(asked.prompt(answer), len(answer), **more)
            outcomes[way].append(outcome)
    full = outcomes[ways[0]]
    for way, found in outcomes.items():
        yield {
            "way": way[0], "share": way[1], "ttft_ms": median(o.ttft_ms for o in found),
            "reused": mean([o.reused for o in found]),
            "ratio": median(own.ttft_ms / ref.ttft_ms for own, ref in zip(found, full, strict=True)),
            "data_perplexity": perplexity(found, "data"), "own_perplexity": perplexity(found, "own"),
            "equal": mean([own.tokens == ref.tokens for own, ref in zip(found, full, strict=True)]),
            "prefix": mean([equal_share(own.tokens, ref.tokens) for own, ref in zip(found, full, strict=True)]),
        }  # fmt: skip


def index_bytes(tokens: int) -> float:
    """Of a token in a content index whose sources share nothing."""
    texts = [np.random.default_rng(seed).integers(0, 50_000, tokens).astype(np.int32) for seed in range(1000)]
    tracemalloc.start()
    index = ContentIndex(32, 1 << 30, b"benchmark")
    for number, text in enumerate(texts):
        index.note_published(number, "", text)
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used_bytes / index.tokens


def perplexity(found: list[Outcome], name: str) -> float:
    """Of all answers' tokens."""
    return math.exp(-mean([logprob for outcome in found for logprob in outcome.logprobs[name]]))


def equal_share(own: list[int], reference: list[int]) -> float:
    """How many tokens come before the first that differs."""
    same = [a == b for a, b in zip(own, reference, strict=False)]
    return (same.index(False) if False in same else len(same)) / max(1, len(reference))


_publish = SequenceMemory.publish


def _publish_chunks(memory: SequenceMemory, sequence: Sequence) -> None:
    """What is asked of the chunks is not cached: all ways find the same."""
    if sequence.group.request.priority == CHUNKS_FIRST:
        _publish(memory, sequence)


def _reads_always(memory: SequenceMemory, sequence: Sequence) -> bool:
    return memory._uses_cache(sequence.group.request)


def main() -> None:
    args = options(
        __doc__, required="data", data=(Path, "folder with longdocs/"), prompts=40, chunk_tokens=384, seed=1,
        shares=Commas(0.0, 0.05, 0.1, 0.15, 0.2), ways=Commas("first", "spread", "deviation"), answer_tokens=24,
        compared=(0.15, "the share of further ways"),
        model=("smollm2-135m-instruct", "folder, file or name"), dtype="auto", kv_mib=384,
    )  # fmt: skip
    torch.set_num_threads(1)
    # log probabilities of the computed tokens are wanted of prompts with reuse as well
    patch.object(SequenceMemory, "reads_cache", _reads_always).start()
    patch.object(SequenceMemory, "publish", _publish_chunks).start()
    for tokens in (32, 1024):
        print(f"content index: {index_bytes(tokens):.1f} bytes a token, of sources with {tokens} tokens each")
    if not args.prompts:
        return
    print(f"{args.prompts} prompts of {CHUNKS} chunks of {args.chunk_tokens} tokens, one thread")
    rows, table = [], Table(COLUMNS)
    for row in ask_all(args):
        table.show(row)
        rows.append(row)
    save(args, rows)


if __name__ == "__main__":
    main()
