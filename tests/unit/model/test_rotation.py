"""Keys moved to other positions: beside keys computed there, for families that rotate in different ways."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from memserve.base.errors import InvariantError, UserError
from memserve.base.types import PositionRegimes, Tier
from memserve.kv.contents import MoveTokens
from memserve.model.attention.reference import ReferencePages
from memserve.model.rotation import find_rotation
from tiny_models import CONTEXT_TOKENS, VOCAB, Driver, loaded, prompt, sequence, tiny_module

BLOCK = 32
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": CONTEXT_TOKENS, "eos_token_id": 2, "bos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip


def made(config):
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=min(0.25, (3 / parameter.shape[-1]) ** 0.5))
    return module.requires_grad_(False).train(False)


ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "llama": lambda: tiny_module("llama"),
    "qwen3, with norms of keys": lambda: tiny_module("qwen3"),
    "gpt_neox, a part rotated": lambda: tiny_module("gpt_neox"),
    "phi, half rotated": lambda: made(transformers.PhiConfig(**SIZES, partial_rotary_factor=0.5)),
    "glm, neighbours, half rotated": lambda: made(
        transformers.GlmConfig(**SIZES, head_dim=16, partial_rotary_factor=0.5)
    ),
    "cohere, neighbours": lambda: made(transformers.CohereConfig(**SIZES)),
    "gemma3, frequencies by layer": lambda: made(
        transformers.Gemma3TextConfig(**(SIZES | {"num_hidden_layers": 6}), head_dim=16, sliding_window=4096)
    ),
    "smollm3, layers without positions": lambda: made(transformers.SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1])),
    "yarn, scaled": lambda: made(transformers.LlamaConfig(**SIZES, rope_scaling=ROPE)),
    "deepseek_v3, latents": lambda: tiny_module("deepseek_v3"),
}


def pages_of(driver):
    return ReferencePages(driver.device._arenas.hbm, driver.geometry)


def keys_and_values(driver, layer, blocks, first, count):
    keys, values = pages_of(driver).read_kv(layer, torch.tensor(blocks), first + count)
    return keys[:, first:], values[:, first:]


def movable(family):
    model = loaded(FAMILIES[family]())
    return replace(model, rotation=find_rotation(model))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shift", [-37, 90])
def test_moved_keys_of_layer_0_are_those_computed_there(family, shift):
    """In layer 0 they depend on token and position alone, so a copy elsewhere is exact but for rounding."""
    text, count = prompt(60, 4), 50
    before, behind = (10, 10 + shift) if shift > 0 else (10 - shift, 10)
    driver = Driver(movable(family))
    for slot, (start, blocks) in enumerate(((before, [1, 5, 2, 9]), (behind, [7, 3, 30, 31, 32]))):
        tokens = np.concatenate((prompt(start, slot), text[:count]))
        driver.step([(slot, 0, len(tokens), ())], open=[sequence(slot, tokens, blocks[: -(-len(tokens) // BLOCK)])])
    expected = keys_and_values(driver, 0, [7, 3, 30, 31, 32], behind, count)
    entry, offset = divmod(before, BLOCK)
    order = MoveTokens(Tier.HBM, [1, 5, 2, 9][entry:], offset, [20, 21, 22], 17, count, shift)
    driver.device._move_tokens(order)
    for moved, computed in zip(keys_and_values(driver, 0, [20, 21, 22], 17, count), expected, strict=True):
        assert float((moved - computed).abs().max()) < 2e-5 * float(computed.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_text_moved_from_the_beginning_answers_as_if_computed(family):
    """Copied from where nothing was before it to where nothing is before it: not by a position, and by none. Then to
    and fro: keys of all layers are what they were."""
    tokens = prompt(64, 6)
    driver = Driver(movable(family))
    driver.step([(0, 0, 64, ())], open=[sequence(0, tokens, [1, 2])])
    layers = range(driver.geometry.num_layers)
    before = [keys_and_values(driver, layer, [1, 2], 0, 64) for layer in layers]
    driver.device._move_tokens(MoveTokens(Tier.HBM, [1, 2], 0, [10, 11, 12], 5, 64, 101))
    driver.device._move_tokens(MoveTokens(Tier.HBM, [10, 11, 12], 5, [20, 21], 0, 64, -101))
    for layer in layers:
        for moved, computed in zip(keys_and_values(driver, layer, [20, 21], 0, 64), before[layer], strict=True):
            torch.testing.assert_close(moved, computed, rtol=1e-4, atol=1e-5)


def test_blocks_of_dram_are_sources_as_well():
    driver = Driver(movable("llama"))
    driver.device._arenas.dram.copy_(torch.randint(0, 100, driver.device._arenas.dram.shape, dtype=torch.uint8))
    driver.device._move_tokens(MoveTokens(Tier.DRAM, [3], 4, [8], 1, 20, 0))
    there = ReferencePages(driver.device._arenas.dram, driver.geometry)
    here = pages_of(driver)
    assert torch.equal(here.k[8][..., 1:21], there.k[3][..., 4:24])
    assert torch.equal(here.v[8][..., 1:21, :], there.v[3][..., 4:24, :])
    assert not here.k[8][..., 21:].any()


def test_frequencies_are_those_of_the_family():
    module = tiny_module("llama")
    expected = module.model.rotary_emb.inv_freq.double()
    rotation = find_rotation(loaded(module))
    assert not rotation.neighbours and rotation.first == 0
    for layer in rotation.frequencies:
        torch.testing.assert_close(layer, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_keys_are_understood_too(dtype):
    module = tiny_module("qwen3").to(getattr(torch, dtype))
    model = loaded(module, dtype)
    exact = find_rotation(loaded(tiny_module("qwen3")))
    torch.testing.assert_close(find_rotation(model).frequencies, exact.frequencies, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "reason"), [("opt", "depend on positions"), ("jamba", "recurrent state"), ("gemma4", "shapes")]
)
def test_models_whose_keys_do_not_move_are_refused(family, reason):
    with pytest.raises(UserError, match=reason):
        find_rotation(loaded(tiny_module(family)))


def test_positions_that_depend_on_a_length_are_refused():
    with pytest.raises(UserError, match="depend on a prompt's length"):
        find_rotation(replace(loaded(tiny_module("llama")), position_regimes=PositionRegimes(64)))


def test_device_without_a_rotation_moves_nothing():
    driver = Driver(loaded(tiny_module("llama")))
    with pytest.raises(InvariantError, match="stays at its positions"):
        driver.device._move_tokens(MoveTokens(Tier.HBM, [1], 0, [2], 0, 8, 1))


def test_rows_of_one_slot_read_what_the_others_write():
    """A prompt with a hole, whose KV was copied there: as if it had been computed in one row."""
    tokens = prompt(70, 8)
    driver = Driver(movable("llama"))
    driver.step([(0, 0, 70, (0,))], open=[sequence(0, tokens, [1, 2, 3])])
    expected = driver.decode(0, 70, 4)
    driver.device._move_tokens(MoveTokens(Tier.HBM, [1, 2], 20, [11, 12], 20, 25, 0))
    got = driver.step([(1, 0, 20, ()), (1, 45, 25, (1,))], open=[sequence(1, tokens, [11, 12, 13])]).tokens
    assert [*got, *driver.decode(1, 70, 3)][1:] == expected[:3]
