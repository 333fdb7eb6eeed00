"""Latents in pages: both ways of attention against plain products, and which layers keep them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from memserve.base.errors import InvariantError, UserError
from memserve.base.kv_layout import Parallel, check_coded, shares
from memserve.base.types import KV_DTYPES, CopyBlocks, KVGeometry, Tier
from memserve.model.attention import latents
from memserve.model.attention.context import StepRows
from memserve.model.attention.expansions import Expansion, expanding_layers, is_expanding, own_expansions
from memserve.model.attention.latents import LatentCosts, LatentPages, measure_costs
from memserve.model.attention.reference import ReferencePages, attend_dense, round_kv, values_of
from memserve.model.forward import EagerForward, weights_alone
from memserve.model.loading import probe
from memserve.model.loading.loader import load_model
from memserve.model.loading.probe import probe_model
from memserve.model.loading.stored import NOT_STORED
from tiny_models import LATENT, Driver, greedy_tokens, loaded, prompt, save_folder, sequence, tiny_module

ABSORBED, EXPANDED = LatentCosts(0, 0, 1, 1), LatentCosts(1, 1, 0, 0)
BY_LENGTH = LatentCosts(absorb=1, absorbed_pair=0, expand=0, expanded_pair=1 / 60)  # expanded: few tokens of context
LAYERS, HEADS, BLOCKS = 2, 4, 30
SHAPES = {"whole": (24, 8, 16, 8), "wide": (64, 16, 32, 40), "odd": (20, 5, 12, 9)}
"""Latent, rotary, key and value; no kernel takes the odd ones."""


def make_expansion(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Expansion:
    latent, _, key, value = shape
    linear = nn.Linear(latent, HEADS * (key + value), bias=False, dtype=dtype).requires_grad_(False)
    torch.nn.init.normal_(linear.weight, std=latent**-0.5, generator=torch.Generator().manual_seed(1))
    return Expansion(linear, HEADS, key, latent)


class World:
    """Sequences whose latents are known, and pages that begin as NaN."""

    def __init__(self, shape: tuple[int, ...], costs: LatentCosts, contexts: list[int], block_tokens: int = 32) -> None:
        self.expansion, (latent, rotary, key, _) = make_expansion(shape), shape
        geometry = KVGeometry(LAYERS, 1, latent + rotary, latent, "float32", block_tokens, latent=True)
        arena = torch.full((BLOCKS * geometry.block_bytes // 4,), torch.nan).view(torch.uint8)
        self.pages, self.latent = LatentPages(arena, geometry, costs), latent
        random = torch.Generator().manual_seed(2)
        self.q = [torch.randn((1, HEADS, n, key + rotary), generator=random) for n in contexts]
        self.k = [torch.randn((1, 1, n, latent + rotary), generator=random) for n in contexts]
        ids = iter(np.random.default_rng(3).permutation(BLOCKS))
        self.tables = np.full((len(contexts), 9), -1, np.int32)
        for row, context in enumerate(contexts):
            for entry in range(-(-context // block_tokens)):
                self.tables[row, entry] = next(ids)

    def step(self, first: list[int], end: list[int], **options: Any) -> list[Tensor]:
        """Tokens ``[first, end)`` of each sequence, in one step that is padded with three more."""
        counts = [stop - start for start, stop in zip(first, end, strict=True)]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        rows = StepRows(self.tables, np.arange(len(counts), dtype=np.int32), starts, np.array(end, np.int32))
        parts = zip(self.q, self.k, first, end, strict=True)
        pieces = [(q[:, :, a:b], k[:, :, a:b]) for q, k, a, b in parts]
        q, k = (torch.cat(tensors, 2) for tensors in zip(*pieces, strict=True))
        q, k = (torch.cat((tensor, tensor[:, :, :1].expand(-1, -1, 3, -1)), 2) for tensor in (q, k))
        step = self.pages.attention_of(rows)
        options = {"scale": 0.3, "expansion": self.expansion} | options
        out = step.run_attention(1, q, k, k[..., : self.latent], **options)
        assert out.is_contiguous() and not out[:, starts[-1] :].any(), "rows that no sequence has"
        return list(out[0, : starts[-1]].split(counts))

    def truth(self, row: int, first: int, end: int, **options: Any) -> Tensor:
        keys, values = self.expansion.expand(self.k[row][:, :, :end])
        rest = options.get("window", 0), options.get("softcap", 0.0), options.get("sinks")
        return attend_dense(self.q[row][0, :, first:end], keys[0], values[0], 0.3, *rest).transpose(0, 1)


ROWS = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=3).filter(
    lambda rows: any(new for _, new in rows)
)


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=15, deadline=None)
@given(rows=ROWS, costs=st.sampled_from([ABSORBED, EXPANDED, BY_LENGTH]), block_tokens=st.sampled_from([16, 32]),
       softcap=st.sampled_from([0.0, 2.0]), scratch=st.sampled_from([1, 1 << 25]))  # fmt: skip
@example(rows=[(0, 0), (0, 1)], costs=ABSORBED, block_tokens=16, softcap=0.0, scratch=1)
def test_both_ways_give_what_plain_products_give(
    shape: str, rows: list[tuple[int, int]], costs: LatentCosts, block_tokens: int, softcap: float, scratch: int
) -> None:
    """Whole prompts, chunks behind a prefix and single tokens, mixed; the scratch holds all, or one block."""
    done, new = ([row[i] for row in rows] for i in range(2))
    contexts = [a + b for a, b in rows]
    world = World(SHAPES[shape], costs, [max(1, context) for context in contexts], block_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latents, "LATENT_SCRATCH_BYTES", scratch)
        if any(done):
            world.step([0] * len(done), done, softcap=softcap)
        outputs = world.step(done, contexts, softcap=softcap)
    for row, out in enumerate(outputs):
        if new[row]:
            want = world.truth(row, done[row], contexts[row], softcap=softcap)
            torch.testing.assert_close(out, want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("costs", [ABSORBED, EXPANDED, BY_LENGTH])
def test_a_row_reads_latents_that_another_writes(costs: LatentCosts) -> None:
    """Two requests with one prefix in one step, of which one computes it."""
    for counts in ((32, 70), (32, 33)):
        world = World(SHAPES["wide"], costs, list(counts))
        world.tables[1, 0] = world.tables[0, 0]
        for parts in (world.q, world.k):
            parts[1][:, :, :32] = parts[0]
        _, second = world.step([0, 32], list(counts))
        torch.testing.assert_close(second, world.truth(1, 32, counts[1]), rtol=1e-4, atol=2e-5)


def test_windows_and_sinks_are_computed_absorbed() -> None:
    world, sinks = World(SHAPES["wide"], EXPANDED, [90]), torch.randn(HEADS)
    for options in ({"window": 20}, {"sinks": sinks}):
        world.pages.attend_expanded = None  # not to be called
        [out] = world.step([0], [90], **options)
        torch.testing.assert_close(out, world.truth(0, 0, 90, **options), rtol=1e-4, atol=2e-5)


def test_a_layer_without_latents_cannot_use_their_pages() -> None:
    with pytest.raises(InvariantError, match="keeps no latents"):
        World(SHAPES["wide"], ABSORBED, [3]).step([0], [3], expansion=None)


def test_costs_choose_by_tokens_and_context() -> None:
    """Few tokens behind much are absorbed, whole prompts are expanded."""
    costs = LatentCosts(absorb=80, absorbed_pair=2, expand=50, expanded_pair=1)
    assert not costs.choose_expanded(1, 1000) and costs.choose_expanded(1000, 1000)
    border = next(count for count in range(1, 1000) if costs.choose_expanded(count, 1000))
    assert 40 < border < 60, "from there on expanding the context pays"
    assert all(costs.choose_expanded(count, 1000) for count in range(border, 1001))


@pytest.mark.parametrize("shape", SHAPES)
def test_costs_are_measured_once_for_a_shape(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(SHAPES[shape], ABSORBED, [3])
    calls: list[Any] = []
    monkeypatch.setattr(latents, "_measured", {})
    monkeypatch.setattr(latents, "measure_costs", lambda *args: calls.append(args) or measure_costs(*args))
    world.pages.costs = None
    world.step([0], [3])
    [costs] = latents._measured.values()
    assert costs.absorb > 0 and costs.expand > 0 and min(costs.absorbed_pair, costs.expanded_pair) >= 0
    other = World(SHAPES[shape], ABSORBED, [3])
    other.pages.costs = None
    other.step([0], [3])
    assert len(calls) == 1


# -- which layers keep them


@pytest.mark.parametrize("family", LATENT)
@pytest.mark.parametrize("costs", [ABSORBED, EXPANDED])
def test_answers_are_right_in_both_ways(family: str, costs: LatentCosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in chunks, then single tokens; a page has one latent a token."""
    monkeypatch.setattr(latents, "measure_costs", lambda *_: costs)
    monkeypatch.setattr(latents, "_measured", {})
    tokens, model = prompt(75, 1), loaded(tiny_module(family))
    assert model.geometry == KVGeometry(3, 1, 32, 24, "float32", 32, latent=True)
    driver = Driver(model)
    driver.step([(3, 0, 50, ())], open=[sequence(3, tokens, [9, 2, 5])])
    got = driver.step([(3, 50, 25, (3,))]).tokens
    assert got + driver.decode(3, 75, 4) == greedy_tokens(tiny_module(family), tokens, 5)


def broken_layer(module: Any, change: Callable[[Any], None]) -> Any:
    change(next(part for part in module.modules() if hasattr(part, "kv_b_proj")))
    return module


def with_bias(layer: Any) -> None:
    old = layer.kv_b_proj
    layer.kv_b_proj = nn.Linear(old.in_features, old.out_features, bias=True)
    layer.kv_b_proj.weight.data, layer.kv_b_proj.bias.data = old.weight.data, torch.randn(old.out_features)
    layer.requires_grad_(False)


def test_layers_that_do_more_keep_keys_and_values() -> None:
    """One layer of three has a bias: all keep expanded KV, and are served as exactly."""
    tokens, module = prompt(40, 4), broken_layer(tiny_module("deepseek_v3"), with_bias)
    expected = greedy_tokens(module, tokens, 3)
    model = loaded(module)
    assert model.geometry == KVGeometry(3, 4, 24, 8, "float32", 32)
    driver = Driver(model)
    got = driver.step([(0, 0, 40, (0,))], open=[sequence(0, tokens, [3, 1])]).tokens
    assert got + driver.decode(0, 40, 2) == expected


def test_values_made_otherwise_are_noticed() -> None:
    """``expand_kv`` of one class scales its values: no linear of the latents alone."""
    module = tiny_module("minicpm3")
    kind = type(next(part for part in module.modules() if hasattr(part, "kv_b_proj")))
    with pytest.MonkeyPatch.context() as patch:
        original = kind.expand_kv
        patch.setattr(kind, "expand_kv", lambda self, *args: (original(self, *args)[0], original(self, *args)[1] * 1.5))
        geometry, layers = probe_model(module, "float32", 32)
    assert not geometry.latent and not expanding_layers(module) and layers[0].latent_dim == 0


@pytest.mark.parametrize("family", ["deepseek_v2", "longcat_flash"])
def test_a_later_start_remembers_latents(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which layers keep them, and which weights are used without their linear: nothing is probed again."""
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "cache"))
    folder, tokens = str(save_folder(tiny_module(family), tmp_path / "tiny")), prompt(40, 6)
    expected = greedy_tokens(tiny_module(family), tokens, 3)
    for _ in range(2):
        model = load_model(folder, "float32", "cpu")
        assert model.geometry.latent
        driver = Driver(model)
        got = driver.step([(0, 0, 40, (0,))], open=[sequence(0, tokens, [3, 1])]).tokens
        assert got + driver.decode(0, 40, 2) == expected
        monkeypatch.setattr(probe, "probe_model", None)


@pytest.mark.parametrize("lower", KV_DTYPES)
def test_latents_are_rounded_in_dram_alone(lower: str) -> None:
    """Down to DRAM and up again: each token's latent is one group of codes, or a group for each 32 elements."""
    tokens, model = prompt(64, 2), loaded(tiny_module("deepseek_v2"))
    driver = Driver(model, lower_dtype=lower)
    driver.step([(0, 0, 64, (0,))], open=[sequence(0, tokens, [3, 1])])
    pages = ReferencePages(driver.device._arenas.hbm.view(-1), model.geometry)
    before = pages.k[[3, 1]].transpose(-1, -2).clone()
    out = CopyBlocks(Tier.HBM, Tier.DRAM, [3, 1], [6, 0])
    driver.step([], close=[0], copies=[out, CopyBlocks(Tier.DRAM, Tier.HBM, [6, 0], [9, 8])])
    after = pages.k[[9, 8]].transpose(-1, -2)
    coded = KVGeometry(3, 1, 32, 24, "float32", 32, lower)
    expected = before if lower == "auto" else values_of(*round_kv(before, coded), coded)
    assert torch.equal(after, expected) and (lower == "auto") == torch.equal(after, before)


def test_latents_can_be_left_expanded() -> None:
    geometry, _ = probe_model(tiny_module("deepseek_v2"), "float32", 32, keep_latents=False)
    assert geometry == KVGeometry(3, 4, 24, 8, "float32", 32)


def test_weights_used_without_their_linear_are_not_packed() -> None:
    """LongCat's routers multiply by a linear's weight themselves: packed, there are no numbers in it."""
    tokens, module = prompt(40, 6), tiny_module("longcat_flash")
    expected = greedy_tokens(module, tokens, 3)
    model = loaded(module)
    assert weights_alone(module) == tuple(f"model.layers.{layer}.mlp.router.classifier" for layer in range(2))
    driver = Driver(model, forward=EagerForward(module))
    got = driver.step([(0, 0, 40, (0,))], open=[sequence(0, tokens, [3, 1])]).tokens
    assert got + driver.decode(0, 40, 2) == expected


def test_owned_weights_no_longer_need_the_linear() -> None:
    module = tiny_module("deepseek_v2")
    probe_model(module, "float32", 32)
    layer = expanding_layers(module)[0]
    expansion, linear = layer.memserve_expansion, layer.kv_b_proj
    before = [weight.clone() for weight in expansion.weights]
    assert is_expanding(module, linear) and not is_expanding(module, layer.o_proj)
    own_expansions(module, NOT_STORED)
    linear.weight.data = torch.empty(0)
    assert all(map(torch.equal, before, expansion.weights)) and isinstance(layer.kv_b_proj, nn.Identity)
    own_expansions(module, NOT_STORED)  # again: nothing is left to do


# -- what is refused, and how many bytes there are


def test_pages_of_latents_have_no_values() -> None:
    """DeepSeek V3: 61 layers of 512 + 64 elements in bfloat16."""
    kv = KVGeometry(61, 1, 576, 512, "bfloat16", 32, latent=True)
    assert kv.token_bytes == 61 * 576 * 2 == 70_272
    assert kv.token_formula == "61 layers x 1 latent x 576 elements x 2 bytes"
    expanded = KVGeometry(61, 128, 192, 128, "bfloat16", 32)
    assert expanded.token_bytes == 4_997_120
    assert expanded.token_formula == "61 layers x 128 heads x (192 K + 128 V) elements x 2 bytes"


def test_what_latents_cannot_be_is_refused() -> None:
    kv = KVGeometry(61, 1, 576, 512, "bfloat16", 32, latent=True)
    with pytest.raises(UserError, match="latents of 2 heads"):
        KVGeometry(61, 2, 576, 512, "bfloat16", 32, latent=True)
    both = shares(Parallel(tensor=2), kv)
    assert [(share.first_head, share.heads) for share in both] == [(0, (1, 1))] * 2, "all heads read them"
    assert len(shares(Parallel(pipeline=2), kv)) == 2
    check_coded(kv, "int8")
    with pytest.raises(UserError, match="kept as they are computed"):
        check_coded(replace(kv, kv_dtype="int8"), "auto")
