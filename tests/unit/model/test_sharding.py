"""Models cut for several workers compute what the whole model does, as they are and captured."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lora_files import merged, save_adapter
from memserve.base.errors import UserError
from memserve.base.kv_layout import Parallel, shares
from memserve.model.attention.context import step_attention
from memserve.model.capture.forward import CapturedForward, best_forward
from memserve.model.forward import EagerForward
from memserve.model.loading.lora import read_adapters
from memserve.model.loading.probe import DenseAttention, probe_model
from memserve.model.lora import Adapters, lora_adapters
from memserve.model.workers.group import WorkerGroup, collectives
from memserve.model.workers.sharding import shard
from tiny_models import VOCAB, tiny_module
from worker_threads import crews, run_workers

TOKENS = (1, 5, 40)
DIVIDED = ("llama", "qwen3", "gemma2", "qwen3_moe", "mixtral", "gpt_oss", "gpt_neox")


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, positions, and the last two rows for logits."""
    ids = torch.arange(tokens) * 17 % VOCAB
    return ids, torch.arange(tokens), torch.arange(max(0, tokens - 2), tokens)


def computed(module: Any, parallel: Parallel, *, capture: bool, adapter: Path | None = None) -> list[torch.Tensor]:
    """Logits of several batches by the workers together; their odd tokens are those of ``adapter``."""
    geometry, _ = probe_model(module, "float32", 32)
    found = shares(parallel, geometry)
    modules = [copy.deepcopy(module) for _ in found]
    read = read_adapters([] if adapter is None else [f"one={adapter}"])
    added = [Adapters(part, read) if read else None for part in modules]
    vocabularies = {shard(*part, geometry, mine) for *part, mine in zip(modules, found, added, strict=True)}
    assert len(vocabularies) == 1

    def work(crew: WorkerGroup, part: Any) -> list[torch.Tensor]:
        forward = best_forward(part, crew) if capture else EagerForward(part, pack=False)
        assert isinstance(forward, CapturedForward) == capture
        mine = added[crew.share.rank]
        if mine is not None:
            mine.pack_halves()
        results = []
        for tokens in TOKENS:
            digests = [read[0].digest if read and at % 2 else "" for at in range(tokens)]
            rows = mine and mine.adapters_of_rows(digests, np.ones(tokens, np.int64), torch.device("cpu"))
            with step_attention(DenseAttention()), collectives(crew), lora_adapters(rows):
                results.append(crew.gather_logits(forward(*inputs(tokens))))
        return results

    members, _regions = crews(found, next(iter(vocabularies)))
    logits: list[torch.Tensor] = run_workers(
        [(crew, partial(work, crew, part)) for crew, part in zip(members, modules, strict=True)]
    )[0]
    return logits


@pytest.mark.parametrize("capture", [False, True], ids=["as it is", "captured"])
@pytest.mark.parametrize("parallel", [Parallel(2), Parallel(1, 3), Parallel(2, 2)], ids=lambda found: found.text)
@pytest.mark.parametrize("family", DIVIDED)
def test_workers_together_compute_what_the_whole_model_does(family: str, parallel: Parallel, capture: bool) -> None:
    module = tiny_module(family)
    results = computed(module, parallel, capture=capture)
    whole = EagerForward(module, pack=False)
    for got, tokens in zip(results, TOKENS, strict=True):
        with step_attention(DenseAttention()):
            expected = whole(*inputs(tokens))
        assert got.shape == expected.shape
        assert torch.allclose(got, expected, atol=2e-4, rtol=1e-4), float((got - expected).abs().max())


@pytest.mark.parametrize("capture", [False, True], ids=["as it is", "captured"])
@pytest.mark.parametrize("parallel", [Parallel(2), Parallel(1, 3), Parallel(2, 2)], ids=lambda found: found.text)
@pytest.mark.parametrize("family", DIVIDED[:-1])  # those with the linears that are adapted
def test_adapters_of_workers_together_add_what_whole_ones_do(
    family: str, parallel: Parallel, capture: bool, tmp_path: Path
) -> None:
    """Columns, rows with their sums, and layers of one stage alone; every second token has the adapter."""
    module = tiny_module(family)
    adapter = save_adapter(tmp_path / "one", module, ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], seed=1)
    results = computed(module, parallel, capture=capture, adapter=adapter)
    whole = copy.deepcopy(module)
    adapters = Adapters(whole, read_adapters([f"one={adapter}"]))
    adapters.pack_halves()
    (digest,) = adapters.digests
    for got, tokens in zip(results, TOKENS, strict=True):
        digests = [digest if at % 2 else "" for at in range(tokens)]
        rows = adapters.adapters_of_rows(digests, np.ones(tokens, np.int64), torch.device("cpu"))
        with step_attention(DenseAttention()), lora_adapters(rows):
            expected = EagerForward(whole, pack=False)(*inputs(tokens))
        with step_attention(DenseAttention()):
            without = EagerForward(module, pack=False)(*inputs(tokens))
        assert torch.allclose(got, expected, atol=2e-4, rtol=1e-4), float((got - expected).abs().max())
        assert tokens == 1 or not torch.allclose(got, without, atol=0.01)


def test_dora_of_workers_together_keeps_the_bias_once(tmp_path: Path) -> None:
    """Of rows each worker has some inputs, and one of them the bias, which magnitudes leave alone."""
    module = tiny_module("llama", attention_bias=True, mlp_bias=True)
    for part in module.modules():
        if isinstance(part, torch.nn.Linear) and part.bias is not None:
            part.bias.data.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(len(part.bias)))
    adapter = save_adapter(tmp_path / "one", module, ["q_proj", "o_proj", "down_proj"], seed=1, dora=True)
    results = computed(module, Parallel(2), capture=False, adapter=adapter)
    whole = merged(module, adapter)
    for got, tokens in zip(results, TOKENS, strict=True):
        adapters = Adapters(copied := copy.deepcopy(module), read_adapters([f"one={adapter}"]))
        adapters.pack_halves()
        digests = [next(iter(adapters.digests)) if at % 2 else "" for at in range(tokens)]
        rows = adapters.adapters_of_rows(digests, np.ones(tokens, np.int64), torch.device("cpu"))
        with step_attention(DenseAttention()), lora_adapters(rows):
            expected = EagerForward(copied, pack=False)(*inputs(tokens))
        assert torch.allclose(got, expected, atol=2e-4, rtol=1e-4), float((got - expected).abs().max())
        every = [digest or next(iter(adapters.digests)) for digest in digests]
        rows = adapters.adapters_of_rows(every, np.ones(tokens, np.int64), torch.device("cpu"))
        with step_attention(DenseAttention()), lora_adapters(rows):
            alone = EagerForward(copied, pack=False)(*inputs(tokens))
        with step_attention(DenseAttention()):
            assert torch.allclose(alone, EagerForward(whole, pack=False)(*inputs(tokens)), atol=2e-4, rtol=1e-4)


def test_each_worker_keeps_only_its_part_of_an_adapter(tmp_path: Path) -> None:
    module = tiny_module("llama")
    geometry, _ = probe_model(module, "float32", 32)
    adapter = save_adapter(tmp_path / "one", module, ["q_proj", "down_proj"], seed=1)
    read = read_adapters([f"one={adapter}"])
    sizes, whole = [], 0
    for share in shares(Parallel(2, 3), geometry):
        part = copy.deepcopy(module)
        adapters = Adapters(part, read)
        whole = adapters.nbytes
        shard(part, share, geometry, adapters)
        sizes.append(adapters.nbytes)
    assert max(sizes) < 0.3 * whole, "a third of the layers, and of each pair one whole half and a part of the other"


def test_each_worker_keeps_only_its_part() -> None:
    module = tiny_module("llama")
    geometry, _ = probe_model(module, "float32", 32)
    whole = sum(parameter.numel() for parameter in module.parameters())
    parts = [copy.deepcopy(module) for _ in range(4)]
    for part, share in zip(parts, shares(Parallel(2, 2), geometry), strict=True):
        shard(part, share, geometry)
    sizes = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]
    assert max(sizes) < 0.6 * whole


@pytest.mark.parametrize(("family", "why"), [("phi3", "its plan leaves out")])
def test_a_model_whose_plan_asks_for_more_is_refused(family: str, why: str) -> None:
    module = tiny_module(family)
    geometry, _ = probe_model(module, "float32", 32)
    with pytest.raises(UserError, match=f"cannot be divided among workers: .*{why}") as refused:
        shard(module, shares(Parallel(2), geometry)[0], geometry)
    assert "--tensor-parallel 1" in refused.value.hint
