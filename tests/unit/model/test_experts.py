"""Experts on a CPU are transformers' own, from plain stacks and packed, however their weights lie."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from memserve.model.attention.context import step_attention
from memserve.model.capture.forward import capture_forward
from memserve.model.experts import EXPERTS_NAME, PackedExperts, experts_of, pack_experts, run_experts, use_our_experts
from memserve.model.linears import PackedLinear
from memserve.model.loading.probe import DenseAttention, probe_model
from tiny_models import VOCAB, tiny_module

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")
"""Plain; plain; turned, with biases, and gates between the ups."""


def inputs(module: Any, tokens: int, experts: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator)
    scores = torch.rand(tokens, experts, generator=generator)
    weights, index = scores.topk(2)
    return x, index, weights


def own_experts(family: str, **sizes: int) -> Any:
    """The experts of a layer, with biases that are not zero."""
    part = experts_of(tiny_module(family, **sizes))[0]
    part.config._experts_implementation = "eager"
    for name, value in part.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(value)
    return part


@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_those_of_transformers(family: str) -> None:
    """For one token, for few and many, and where some experts have none."""
    part = own_experts(family)
    packed = pack_experts(part, lambda w, bias: PackedLinear([w.contiguous()], None if bias is None else [bias]))
    for tokens in (1, 2, 7, 200):
        x, index, weights = inputs(part, tokens, 4, 32, seed=tokens)
        want = part(x, index, weights)
        for experts in (part, packed):
            torch.testing.assert_close(run_experts(x, index, weights, experts), want, rtol=1e-5, atol=1e-5)
    nothing = run_experts(torch.empty(0, 32), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2), packed)
    assert nothing.shape == (0, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_forward_has_packed_experts(family: str, dtype: torch.dtype) -> None:
    module = tiny_module(family).to(dtype)
    ids, positions = torch.arange(1, 60) * 7919 % VOCAB, torch.arange(59)
    with torch.inference_mode():
        module.set_experts_implementation("eager")
        want = module(input_ids=ids[None], use_cache=False).logits[0].float()
    probe_model(module, str(dtype).removeprefix("torch."), 32)
    assert module.config._experts_implementation == EXPERTS_NAME
    forward = capture_forward(copy.deepcopy(module))
    assert forward is not None and {type(layer) for layer in forward._experts} == {PackedLinear}
    with step_attention(DenseAttention()):
        got = forward(ids, positions, positions)
    limit = 1e-5 if dtype == torch.float32 else 0.1
    assert float((got - want).square().mean().sqrt() / want.std()) < limit


def test_what_is_no_plain_stack_is_left_to_transformers() -> None:
    module = tiny_module("qwen3_moe")
    experts_of(module)[1].gate_up_proj = torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False)
    before = module.config._experts_implementation
    use_our_experts(module)
    assert module.config._experts_implementation == before != EXPERTS_NAME
    assert not isinstance(experts_of(module)[0], PackedExperts)
