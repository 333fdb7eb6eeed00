"""Hybrids and latents beside transformers: decode steps and prompts of random models with layers of real sizes.

    python bench/hybrids.py [--models delta,mamba2,conv,latents] [--dtype bfloat16] [--rounds 9] [--stored Q4_0]
        [--drafts 4] [--profile]

Four layers each: *delta* has the layers of Qwen3.5 0.8B (three gated delta nets, one of attention), *mamba2* those of
Granite 4.0 H 1B (three of Mamba-2, one of attention), *conv* those of LFM2 1.2B (three short convolutions, one of
attention), *latents* those of DeepSeek V3 with the widths of V2-Lite (a dense layer, then experts). Vocabularies are
small. Ours is the forward that an instance would run, with pages and states of slots; transformers is the same module
with SDPA and its own cache, in the same dtype. *Linears* is what the products with our weights take alone, without
experts', and how fast that is: GB of weights read, or billions of products, in a second. *Eager* is ours as
transformers' modules; with ``--stored`` ours is measured with its linears' weights in a format of GGUF files, too.
With ``--drafts N`` steps of single tokens are measured with N drafts behind each as well: what *one costs* is what the
step takes longer, by the time of one without.
Contenders take turns; figures are medians of the CPU time of one thread (``OMP_NUM_THREADS=1``), with the median of the
rounds' ratios.
``--profile`` prints where a step of ours spends its time instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from harness.flags import Commas, options, parts_of, save
from harness.rounds import Samples, turns
from harness.steps import BLOCK_TOKENS, paged_step, random_module, some_ids
from harness.tables import Table
from torch import Tensor

from memserve.instance.events import StepPlan
from memserve.model.attention.context import OrderedAttention, step_attention
from memserve.model.capture.forward import CapturedForward, best_forward
from memserve.model.experts import use_our_experts
from memserve.model.forward import EagerForward
from memserve.model.linears import PackedLinear
from memserve.model.loading.probe import probe_model
from memserve.model.loading.stored import StoredWeight, StoredWeights, remember_stored
from memserve.model.states.layers import states_of, step_states
from memserve.model.states.memory import RaggedStates, SlotStates

COMMON = {"vocab_size": 1056, "max_position_embeddings": 8192, "num_hidden_layers": 4, "tie_word_embeddings": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "delta": ("Qwen3_5TextConfig", {
        "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    }),
    "mamba2": ("GraniteMoeHybridConfig", {
        "hidden_size": 1536, "intermediate_size": 4096, "shared_intermediate_size": 4096, "num_attention_heads": 12,
        "num_key_value_heads": 4, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 48,
        "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "layer_types": ["mamba"] * 3 + ["attention"],
    }),
    "conv": ("Lfm2Config", {
        "hidden_size": 2048, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
        "layer_types": ["conv"] * 3 + ["full_attention"],
    }),
    "latents": ("DeepseekV3Config", {
        "hidden_size": 2048, "intermediate_size": 10944, "num_attention_heads": 16, "num_key_value_heads": 16,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "head_dim": 64, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 4,
        "topk_group": 2, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
    }),
}  # fmt: skip
CASES = {"decode 1": (1, 1, 512), "decode 8": (8, 1, 512), "prompt of 512": (1, 512, 512)}
"""Sequences, new tokens of each, context behind them."""
DTYPES = {0: torch.float32, 1: torch.bfloat16}
"""Of weights, by the code of their layer: routers' are wider than the model."""


def random_model(name: str, dtype: str) -> Any:
    """One of :data:`MODELS`, with random weights."""
    import transformers

    kind, sizes = MODELS[name]
    return random_module(getattr(transformers, kind)(**COMMON, **sizes), dtype)


def keep_stored(module: Any, kind: str) -> None:
    """Let the linears of ``module`` compute with weights that are rounded to ``kind``, a format of GGUF files."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    weights = [part.weight for part in module.modules() if isinstance(part, torch.nn.Linear)]
    pairs = []
    for weight in weights:
        if weight.shape[1] % 32 == 0:
            blocks = torch.from_numpy(quantize(weight.detach().float().numpy(), GGMLQuantizationType[kind]))
            pairs.append((weight.detach(), StoredWeight(kind, weight.shape[1], blocks)))
    remember_stored(module, StoredWeights(pairs))


class Ours:
    """A forward over pages and slots of its own."""

    def __init__(self, module: Any, dtype: str, *, eager: bool = False, stored: str = "") -> None:
        if stored:
            keep_stored(module, stored)
        use_our_experts(module)
        self.geometry, _ = probe_model(module, dtype, BLOCK_TOKENS)
        self.states = states_of(module).geometry
        self.forward = EagerForward(module) if eager else best_forward(module)

    def prepare(self, sequences: int, count: int, context: int, drafts: int = 0) -> Callable[[], Tensor]:
        """A step over zeros; ``drafts``: so many behind the tokens of each sequence, of which half are right."""
        count, context = count + drafts, context + drafts
        paged = paged_step(self.geometry, COMMON["vocab_size"], sequences, count, context)
        slots, pages = None, torch.empty((0, 1), dtype=torch.uint8)
        if self.states:
            slots = SlotStates(self.states, sequences, pages, draft_states=sequences * count if drafts else 0)
        state_rows = tuple(np.full(sequences, number, np.int64) for number in (0, context - count, count))
        state_rows[0][:] = np.arange(sequences)
        plan = StepPlan(0, drafts={row: [0] * drafts for row in range(sequences)} if drafts else {})
        last = torch.arange(sequences * count) if drafts else paged.last

        def step() -> Tensor:
            attention, states = paged.attention(), None
            if slots is not None:
                slots.tokens[:] = context - count
                states, attention = RaggedStates(slots, plan, state_rows, ()), OrderedAttention(attention)
            with step_attention(attention), step_states(states):
                logits = self.forward(paged.ids, paged.positions, last)
            if slots is not None and states is not None:
                states.finish()
                for slot in range(sequences):
                    slots.settle_drafts(slot, 1 + drafts // 2)
            return logits

        return step


class Drafted:
    """Ours, with drafts behind single tokens."""

    def __init__(self, ours: Ours, drafts: int) -> None:
        self._ours, self._drafts = ours, drafts

    def prepare(self, sequences: int, count: int, context: int) -> Callable[[], Tensor]:
        """Prompts have none."""
        return self._ours.prepare(sequences, count, context, self._drafts if count == 1 else 0)


class Linears:
    """The products with the weights of one of ours, one after the other."""

    def __init__(self, forward: CapturedForward) -> None:
        self.layers = [layer for layer in forward._linears if isinstance(layer, PackedLinear)]

    def rows_of(self, layer: PackedLinear, sequences: int, count: int) -> int:
        """The head computes one row of each sequence."""
        return sequences if layer.n == COMMON["vocab_size"] else sequences * count

    def prepare(self, sequences: int, count: int, context: int) -> Callable[[], object]:
        """With numbers that mean nothing."""
        inputs = [torch.randn(self.rows_of(layer, sequences, count), layer.k) for layer in self.layers]
        pairs = [(layer, x.to(DTYPES[layer.code])) for layer, x in zip(self.layers, inputs, strict=True)]
        return lambda: [layer(x) for layer, x in pairs]

    def speed(self, shape: tuple[int, int, int], ms: float) -> str:
        """Of steps that took ``ms``: bytes read where there are few rows, products where there are many."""
        if shape[1] == 1:
            size = sum(layer.n * layer.k * DTYPES[layer.code].itemsize for layer in self.layers)
            return f"{size / ms / 1e6:.0f} GB/s"
        products = sum(layer.n * layer.k * self.rows_of(layer, *shape[:2]) for layer in self.layers)
        return f"{products / ms / 1e6:.0f} G/s"


class Transformers:
    """The module itself, with SDPA and its own cache."""

    def __init__(self, module: Any) -> None:
        module.set_attn_implementation("sdpa")
        self._module = module

    def prepare(self, sequences: int, count: int, context: int) -> Callable[[], Tensor]:
        """Prompts behind an empty cache; else steps behind one that a prompt has filled, and that grows with them."""
        from transformers import DynamicCache

        def run(cache: Any, begin: int, end: int) -> Tensor:
            ids = some_ids(sequences * (end - begin), COMMON["vocab_size"]).view(sequences, -1)
            positions = torch.arange(begin, end).repeat(sequences, 1)
            with torch.inference_mode():
                out = self._module(
                    input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
                )
            logits: Tensor = out.logits
            return logits

        before, behind = context - count, DynamicCache(config=self._module.config)
        if not before:
            return lambda: run(DynamicCache(config=self._module.config), 0, count)
        run(behind, 0, before)
        return lambda: run(behind, before, context)


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU time of this thread."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def show_profile(model: str, dtype: str, steps: int) -> None:
    """Where a step of ours spends its time, operation by operation."""
    from torch.profiler import ProfilerActivity, profile

    ours = Ours(random_model(model, dtype), dtype)
    print(getattr(getattr(ours.forward, "native", ours.forward), "source", ""))
    for case, shape in CASES.items():
        step = ours.prepare(*shape)
        step()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(steps):
                step()
        print(f"{model}, {dtype}, {case}: {steps} steps")
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))


def main() -> None:
    args = options(
        __doc__, models=Commas(*MODELS), dtype=("bfloat16", "of all", ("bfloat16", "float32")), rounds=9,
        eager=(False, "measure ours as transformers' modules, too"),
        stored=("", "measure ours with weights in this format, too, such as Q4_0"),
        drafts=(0, "measure ours with so many drafts behind single tokens, too"),
        profile=(False, "print where the time goes"),
    )  # fmt: skip
    torch.set_num_threads(1)
    table = Table({
        "model": "{model}", "step": "{step}", "ms": "{ours:.2f}", "tokens/s": "{speed:,.0f}",
        "transformers": "{transformers:.2f}", "times": "{times:.2f}", "linears": "{linears:.2f}", "at": "{at}",
        **({"eager": "{eager:.2f}", "times eager": "{eager_times:.2f}"} if args.eager else {}),
        **({args.stored: "{stored:.2f}", "times as fast": "{stored_times:.2f}"} if args.stored else {}),
        **({f"{args.drafts} drafts": "{drafted:.2f}", "one costs": "{draft_cost:.2f}"} if args.drafts else {}),
    })  # fmt: skip
    records = []
    for model in parts_of(args.models, MODELS):
        if args.profile:
            show_profile(model, args.dtype, args.rounds)
            continue
        ours = Ours(random_model(model, args.dtype), args.dtype)
        if not isinstance(ours.forward, CapturedForward):
            raise SystemExit(f"{model} is not captured")
        linears, own = Linears(ours.forward), Transformers(random_model(model, args.dtype))
        contenders: dict[str, Any] = {"ours": ours, "transformers": own, "linears": linears}
        if args.eager:
            contenders["eager"] = Ours(random_model(model, args.dtype), args.dtype, eager=True)
        if args.stored:
            contenders["stored"] = Ours(random_model(model, args.dtype), args.dtype, stored=args.stored)
        if args.drafts:
            contenders["drafted"] = Drafted(ours, args.drafts)
        for case, shape in CASES.items():
            times = Samples()
            steps = {name: contender.prepare(*shape) for name, contender in contenders.items()}
            for number, name in turns(args.rounds, steps, warm=2):
                spent_s = cpu_seconds(steps[name])
                times[name] += [1e3 * spent_s] if number >= 0 else []
            row: dict[str, Any] = {"model": model, "dtype": args.dtype, "step": case}
            row |= {name: times.median(name) for name in steps}
            row |= {"speed": 1e3 * shape[0] * shape[1] / row["ours"], "times": times.ratio("transformers", "ours")}
            row["at"] = linears.speed(shape, row["linears"])
            row["draft_cost"] = (times.ratio("drafted", "ours") - 1) / args.drafts if args.drafts else 0.0
            row["stored_times"] = times.ratio("ours", "stored") if args.stored else 0.0
            row["eager_times"] = times.ratio("eager", "ours") if args.eager else 0.0
            records.append(row)
            table.show(row)
    save(args, records)


if __name__ == "__main__":
    main()
