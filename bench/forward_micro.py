"""Times one step of the forward, attention included, against the machine's limit.

    python bench/forward_micro.py MODEL_FOLDER [--dtype bfloat16] [--rounds 9] [--forwards eager,packed,captured]

Decode steps of 1, 8 and 32 sequences with 160 tokens of context, prefills of 512 and 2,048 tokens. The forwards
alternate in every round, and so do the two measurements of the machine, because its speed changes from minute to
minute: ``limit`` is the larger of weight bytes / measured bandwidth and products / measured matrix rate.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial

import numpy as np
import torch
from harness.flags import Commas, options, save
from harness.rounds import Samples, seconds
from harness.served import bundled_model
from harness.tables import show
from torch import Tensor

from memserve.model.attention.context import StepRows, step_attention
from memserve.model.attention.latents import choose_attention
from memserve.model.capture.forward import capture_forward, release_weights
from memserve.model.forward import EagerForward, Forward
from memserve.model.loading.loader import LoadedModel, load_model

CONTEXT_TOKENS = 160
CASES = {  # sequences, new tokens per sequence
    "decode 1": (1, 1),
    "decode 8": (8, 1),
    "decode 32": (32, 1),
    "prefill 512": (1, 512),
    "prefill 2048": (1, 2048),
}


def make_forward(name: str, model: LoadedModel) -> Forward:
    """``eager``: transformers' modules; ``packed``: with oneDNN-packed linears; ``captured``: the rewritten graph."""
    if name == "captured":
        captured = capture_forward(model.module)
        if captured is None:
            raise SystemExit("this model cannot be captured")
        release_weights(model.module)
        return captured
    return EagerForward(model.module, pack=name == "packed")


class Case:
    """The inputs of one kind of step, over its own arena."""

    def __init__(self, model: LoadedModel, sequences: int, new_tokens: int) -> None:
        context = new_tokens if new_tokens > 1 else CONTEXT_TOKENS
        blocks = -(-context // model.geometry.block_tokens)
        arena = torch.zeros(sequences * blocks * model.geometry.block_bytes, dtype=torch.uint8)
        self._arena = arena
        self._factory = choose_attention(arena, model.geometry)
        tables = np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks)
        starts = (np.arange(sequences + 1) * new_tokens).astype(np.int32)
        contexts = np.full(sequences, context, dtype=np.int32)
        self._rows = StepRows(tables, np.arange(sequences, dtype=np.int32), starts, contexts)
        generator = torch.Generator().manual_seed(1)
        self._ids = torch.randint(1, model.vocab_size, (sequences * new_tokens,), generator=generator)
        self._positions = torch.arange(context - new_tokens, context).repeat(sequences)
        self._last = torch.as_tensor(starts[1:] - 1).long()

    def run(self, forward: Forward) -> Tensor:
        """One step, as the device runs it."""
        with step_attention(self._factory(self._rows)):
            return forward(self._ids, self._positions, self._last)


def machine(dtype: torch.dtype) -> tuple[float, float]:
    """(GB/s of reading memory, GFLOP/s of a packed matrix product), the best of a few tries."""
    memory = torch.ones(64 << 20, dtype=torch.float32)
    bandwidth = max(memory.nbytes / 1e9 / seconds(memory.sum) for _ in range(5))
    weight = torch.ops.mkldnn._reorder_linear_weight(torch.randn(3072, 1024).to(dtype), 8)
    x = torch.randn(1024, 1024).to(dtype)
    product = partial(torch.ops.mkldnn._linear_pointwise, x, weight, None, "none", [], "")
    return bandwidth, max(2 * 1024 * 1024 * 3072 / 1e9 / seconds(product) for _ in range(5))


def measure(args: Namespace, models: dict[str, LoadedModel]) -> tuple[Samples, float, float]:
    """Milliseconds by case and forward; bandwidth and matrix rate of the machine."""
    first, times = next(iter(models.values())), Samples()
    forwards = {name: make_forward(name, model) for name, model in models.items()}
    cases = {name: Case(first, *sizes) for name, sizes in CASES.items()}
    rates = [machine(first.dtype)]
    for number in range(args.rounds + 1):
        for case, inputs in cases.items():
            if "prefill" in case and number > max(1, args.rounds // 3):
                continue
            for name, forward in forwards.items():
                spent_s = seconds(partial(inputs.run, forward))
                times[case, name] += [1e3 * spent_s] if number else []  # the first round warms up
        rates.append(machine(first.dtype))
    bandwidth, rate = (max(column) for column in zip(*rates, strict=True))
    return times, bandwidth, rate


def main() -> None:
    args = options(
        __doc__, rest="model", dtype="bfloat16", rounds=9, forwards=Commas("eager", "packed", "captured")
    )  # fmt: skip
    folder = args.model[0] if args.model else bundled_model(args.dtype)
    models = {name: load_model(folder, args.dtype) for name in args.forwards}
    first, last = models[args.forwards[0]], args.forwards[-1]
    embedding = first.module.get_output_embeddings().weight.numel()
    layers = sum(p.numel() for p in first.module.parameters() if p.dim() == 2) - embedding
    times, bandwidth, rate = measure(args, models)
    print(f"{args.dtype}, {torch.get_num_threads()} threads, {bandwidth:.1f} GB/s, {rate:.0f} GFLOP/s")
    print("milliseconds a step: median (best)")
    rows, item_bytes = [], torch.empty(0, dtype=first.dtype).element_size()
    for case, (sequences, new_tokens) in CASES.items():
        tokens = sequences * new_tokens
        memory_ms = (layers + embedding) * item_bytes / bandwidth / 1e6
        compute_ms = 2 * (layers * tokens + embedding * sequences) / rate / 1e6
        row = {"step": case, "limit": f"{max(memory_ms, compute_ms):.1f}"}
        row |= {name: f"{times.median((case, name)):.1f} ({min(times[case, name]):.1f})" for name in models}
        middle, best = times.median((case, last)), min(times[case, last])
        rows.append(row | {"speed": f"{tokens / middle * 1e3:.0f} ({tokens / best * 1e3:.0f})"})
    columns = {name: f"{{{name}}}" for name in ("step", *models, "limit")}
    show(rows, columns | {f"tokens/s of {last} (best)": "{speed}"})
    save(args, rows)


if __name__ == "__main__":
    main()
