"""The engines that ``rivals.py`` measures, each behind the same three calls. Runs in child processes, one per engine:

``python rival_engines.py NAME '{"model": ..., "dtype": ...}'`` answers JSON commands on stdin with JSON on stdout. The
child may be another virtual environment's Python, so this file imports only the requested engine.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

VOCAB = 49_000
Prompts = list[list[int]]


class Engine:
    """An engine to be measured. ``generate`` computes ``prompts`` as one batch, greedy, ignoring end of sequence."""

    version = ""

    def generate(self, prompts: Prompts, tokens: int) -> None:
        """Generate exactly ``tokens`` tokens for every prompt."""
        raise AssertionError(f"{type(self).__name__} generates nothing")

    def warm(self, prompt: list[int]) -> float:
        """Seconds to the first token of a prompt that was computed just before."""
        return seconds(lambda: self.generate([prompt], 1))

    def decode(self, prompts: Prompts, tokens: int) -> float:
        """Seconds to generate ``tokens`` tokens after the first. The first call fills the prefix cache, if there is
        one, so that both timed calls start equally."""
        self.generate(prompts, 1)
        first = seconds(lambda: self.generate(prompts, 1))
        return seconds(lambda: self.generate(prompts, tokens + 1)) - first


CLOCK = [time.perf_counter]
"""Wall time, or CPU time of the process where a command says so."""


def seconds(run: Callable[[], object]) -> float:
    start = CLOCK[0]()
    run()
    return CLOCK[0]() - start


class Memserve(Engine):
    """``memserve.LLM`` in this process."""

    def __init__(self, model: str, dtype: str, **options: Any) -> None:
        from importlib.metadata import version

        from memserve.api.llm import LLM
        from memserve.base.types import SamplingParams

        self.llm = LLM(model, dtype=dtype, **options)
        self.greedy = SamplingParams(temperature=0.0)
        self.version = version("memserve")

    def generate(self, prompts: Prompts, tokens: int) -> None:
        results = self.llm.generate(prompts, self.greedy, max_tokens=tokens, ignore_eos=True)
        assert all(len(d.outputs[0].tokens) == tokens for d in results)


class Vllm(Engine):
    """vLLM's offline class in this process; ``compile`` turns its compiler on."""

    def __init__(self, model: str, dtype: str, compile: bool = False) -> None:
        os.environ.update(
            HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="2", VLLM_LOGGING_LEVEL="ERROR",
            VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND=f"0-{(os.cpu_count() or 1) - 1}",
        )  # fmt: skip
        import vllm

        self.llm = vllm.LLM(
            model, max_model_len=4096, enforce_eager=not compile, dtype=dtype, block_size=32,
            enable_prefix_caching=True, max_num_seqs=64, seed=0,
        )  # fmt: skip
        self.vllm, self.version = vllm, vllm.__version__

    def generate(self, prompts: Prompts, tokens: int) -> None:
        greedy = self.vllm.SamplingParams(
            max_tokens=tokens, min_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        results = self.llm.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
        assert all(len(d.outputs[0].token_ids) == tokens for d in results)


class Transformers(Engine):
    """``generate`` of transformers: one static batch, dynamic cache, sdpa."""

    def __init__(self, model: str, dtype: str) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        import transformers

        self.torch, self.version = torch, transformers.__version__
        kind = transformers.AutoModelForCausalLM
        self.model = kind.from_pretrained(model, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()

    def generate(self, prompts: Prompts, tokens: int, **cache: Any) -> None:
        ids = self.torch.tensor(prompts)
        with self.torch.inference_mode():
            out = self.model.generate(
                input_ids=ids, attention_mask=self.torch.ones_like(ids), max_new_tokens=tokens,
                min_new_tokens=tokens, do_sample=False, pad_token_id=0, **cache,
            )  # fmt: skip
        assert out.shape[1] == ids.shape[1] + tokens

    def warm(self, prompt: list[int]) -> float:
        """The cache of all but the last token is passed in; computing it is not timed."""
        with self.torch.inference_mode():
            ids = self.torch.tensor([prompt[:-1]])
            cache = self.model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
        return seconds(lambda: self.generate([prompt], 1, past_key_values=cache))


class LlamaCpp(Engine):
    """llama.cpp through llama-cpp-python's low-level batch interface; ``model`` is a GGUF file."""

    def __init__(self, model: str, dtype: str, threads: int = os.cpu_count() or 1) -> None:
        import llama_cpp

        self.lib = lib = llama_cpp
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(model.encode(), params)
        context = lib.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max = 32 * 256, 2048, 512, 32
        context.n_threads = context.n_threads_batch = threads
        context.kv_unified = True
        self.context = lib.llama_init_from_model(self.model, context)
        self.memory = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(4096, 0, 1)
        self.version = llama_cpp.__version__

    def _compute(self, items: list[tuple[int, int, int, bool]]) -> None:
        """``(token, position, sequence, wants logits)`` each."""
        b = self.batch
        b.n_tokens = len(items)
        for i, (token, position, sequence, wants) in enumerate(items):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, position, 1, wants
            b.seq_id[i][0] = sequence
        assert self.lib.llama_decode(self.context, b) == 0

    def _prefill(self, prompt: list[int], sequence: int, start: int = 0) -> None:
        for low in range(start, len(prompt), 2048):
            part = range(low, min(low + 2048, len(prompt)))
            self._compute([(prompt[i], i, sequence, i == len(prompt) - 1) for i in part])

    def generate(self, prompts: Prompts, tokens: int) -> None:
        self.lib.llama_memory_clear(self.memory, True)
        for sequence, prompt in enumerate(prompts):
            self._prefill(prompt, sequence)
        self._decode(prompts, tokens - 1)

    def _decode(self, prompts: Prompts, tokens: int) -> None:
        """The input tokens are arbitrary: only speed matters, without sampling."""
        for step in range(tokens):
            self._compute([(5 + step, len(p) + step, s, True) for s, p in enumerate(prompts)])

    def warm(self, prompt: list[int]) -> float:
        self.lib.llama_memory_seq_rm(self.memory, 0, len(prompt) - 1, -1)
        return seconds(lambda: self._prefill(prompt, 0, len(prompt) - 1))

    def decode(self, prompts: Prompts, tokens: int) -> float:
        self.generate(prompts, 1)
        return seconds(lambda: self._decode(prompts, tokens))


ENGINES: dict[str, type[Engine]] = {
    "memserve": Memserve, "vllm": Vllm, "transformers": Transformers, "llamacpp": LlamaCpp
}  # fmt: skip


def resident_mb() -> float:
    """Resident memory of this process now, in MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def measure(engine: Engine, command: dict[str, Any]) -> dict[str, float]:
    """Run one measurement of ``command["prompts"]``, else of prompts drawn from its seed, so every engine gets the same
    ones."""
    if "prompts" in command:
        CLOCK[0] = time.process_time if command["cpu"] else time.perf_counter
        return {"decode_s": engine.decode(command["prompts"], command["new"])}
    rng = random.Random(command["seed"])
    prompts = [[rng.randrange(5, VOCAB) for _ in range(command["tokens"])] for _ in range(command["batch"])]
    if command["op"] == "prefill":
        cold = seconds(lambda: engine.generate(prompts, 1))
        tokens = command["tokens"] * command["batch"]
        warm = {"ttft_warm_ms": engine.warm(prompts[0]) * 1e3} if command["batch"] == 1 else {}
        return {"prefill_tok_s": tokens / cold, "ttft_cold_ms": cold * 1e3, **warm}
    return {"decode_tok_s": command["new"] * command["batch"] / engine.decode(prompts, command["new"])}


def main() -> None:
    """Build the engine, say that it is ready, then answer one command after another."""
    start = time.perf_counter()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine's own prints must not mix with answers
    engine = ENGINES[sys.argv[1]](**json.loads(sys.argv[2]))
    ready = time.perf_counter() - start
    engine.generate([list(range(5, 69))], 8)  # warm-up, as every engine's own benchmark does
    engine.generate([list(range(5, 517))], 1)
    hello = {"version": engine.version, "startup_s": ready, "resident_mb": resident_mb()}
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        answer = measure(engine, json.loads(line))
        answer["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # some engines hang in their own exit handlers


if __name__ == "__main__":
    main()
