"""The comparison at load: what carries more than keys and values is refused, noise is not; the verdict is kept."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from memserve import LLM
from memserve.base.errors import UserError
from memserve.model.loading import comparison, probe
from memserve.model.loading.cache import record_file, record_name
from memserve.model.loading.comparison import KIND, compare_in_pieces, compare_once, read_verdict
from memserve.model.loading.probe import probe_model
from tiny_models import FAMILIES, STATEFUL, save_folder, tiny_module


def compared(module: Any, dtype: str = "float32", longest: int | None = None) -> None:
    module = module.to(getattr(torch, dtype))
    _, layers = probe_model(module, dtype, 32)
    compare_in_pieces(module, layers, dtype, longest)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_keys_and_values_pass(family: str, dtype: str) -> None:
    compared(tiny_module(family), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", STATEFUL)
def test_families_with_states_pass(family: str, dtype: str) -> None:
    compared(tiny_module(family), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_5", "lfm2"])
def test_a_state_that_is_not_carried_is_refused(family: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe may miss what a layer keeps: then the model must not be served without it."""
    find = probe.find_states
    monkeypatch.setattr(probe, "find_states", lambda *found: replace(find(*found), layers=find(*found).layers[:-1]))
    with pytest.raises(UserError, match=f"{family}.* model cannot be served"):
        compared(tiny_module(family), dtype)


def test_single_tokens_computed_otherwise_are_refused() -> None:
    with pytest.raises(UserError, match=r"zamba2 model cannot be served: .* single tokens otherwise than several"):
        compared(tiny_module("zamba2"))


def test_a_count_of_positions_of_its_own_is_refused() -> None:
    """RoBERTa's first token has the position behind its padding's id: served from 0 on, every token was wrong."""
    config = transformers.RobertaConfig(
        vocab_size=131, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=258, pad_token_id=1, is_decoder=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with pytest.raises(UserError, match=r"roberta model cannot be served: .* counts otherwise"):
        compared(transformers.RobertaForCausalLM(config).eval())


def leaking(strength: float) -> Any:
    """A Llama whose hidden states get a share of those of the token before: nothing says that it carries anything."""
    module = tiny_module("llama")

    def leak(layer: Any, arguments: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        mixed = hidden.clone()
        mixed[:, 1:] += strength * hidden[:, :-1]
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    module.model.layers[1].register_forward_hook(leak)
    return module


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_hidden_state_between_steps_is_refused(dtype: str) -> None:
    with pytest.raises(UserError, match="carries more from one step to the next than keys and values"):
        compared(leaking(0.05), dtype)


def large_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a model that has convolutions and no room for a copy in float32."""
    monkeypatch.setattr(comparison, "FLOAT32_BYTES_MAX", 0)
    monkeypatch.setattr(comparison, "_goes_in_float32", lambda module: True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_large_model_is_widened_layer_by_layer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer at a time is in float32, beside embedding and head; afterwards all weights are the same tensors."""
    large_in_float32(monkeypatch)
    module = tiny_module(family).to(torch.bfloat16)
    before = {name: value.data_ptr() for name, value in module.named_parameters()}
    layers = next(part for part in module.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == 3)
    seen: list[int] = []

    def count(*_: object) -> None:
        seen.append(sum(next(layer.parameters()).dtype == torch.float32 for layer in layers))

    for layer in layers:
        next(part for part in layer.modules() if isinstance(part, torch.nn.Linear)).register_forward_hook(count)
    compared(module, "bfloat16")
    assert seen.count(1) >= 3 * len(layers) and max(seen) == 1, "the probe computes in bfloat16"
    assert {name: value.data_ptr() for name, value in module.named_parameters()} == before
    assert {value.dtype for value in module.parameters()} == {torch.bfloat16}


def test_a_large_model_is_looked_at_as_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    large_in_float32(monkeypatch)
    with pytest.raises(UserError, match="carries more from one step to the next than keys and values"):
        compared(leaking(0.05), "bfloat16")


def test_what_16_bits_round_away_is_decided_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3 270M was refused: sums of bfloat16 alone change its logits by a fifth of their spread."""
    monkeypatch.setattr(comparison, "FLOAT32_BYTES_MAX", 0)
    monkeypatch.setitem(comparison.TOLERANCE, "bfloat16", (1e-9, 1e-9))
    compared(tiny_module("llama"), "bfloat16")
    with pytest.raises(UserError, match="carries more from one step to the next than keys and values"):
        compared(leaking(0.05), "bfloat16")


def test_a_few_positions_at_a_threshold_are_noise() -> None:
    """A router may give two tokens of a prompt to another expert when a sum is rounded otherwise."""
    module = tiny_module("llama")
    head = module.get_output_embeddings()
    plain = head.forward

    def flips(hidden: torch.Tensor) -> torch.Tensor:
        logits = plain(hidden).clone()
        if hidden.shape[1] < 60:  # in pieces
            logits[:, ::10] = logits[:, ::10].flip(-1)
        return logits

    head.forward = flips
    compared(module)


def test_a_model_of_16_bits_is_left_as_it_was() -> None:
    module = tiny_module("llama").to(torch.bfloat16)
    module.model.rotary_emb.inv_freq.data = module.model.rotary_emb.inv_freq.data.float() * 1.000001
    before = {name: value.clone() for name, value in (*module.named_parameters(), *module.named_buffers())}
    _, layers = probe_model(module, "bfloat16", 32)
    compare_in_pieces(module, layers, "bfloat16")
    after = dict((*module.named_parameters(), *module.named_buffers()))
    assert all(after[name].dtype == value.dtype and torch.equal(after[name], value) for name, value in before.items())
    tied = module.get_input_embeddings().weight.data_ptr() == module.get_output_embeddings().weight.data_ptr()
    assert tied, "a tied head is still one tensor"


@pytest.mark.parametrize("longest", [1, 3, 30])
def test_a_prompt_is_no_longer_than_allowed(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    inner = comparison._logits
    monkeypatch.setattr(
        comparison, "_logits", lambda module, ids, *rest: lengths.append(len(ids)) or inner(module, ids, *rest)
    )
    compared(tiny_module("llama"), longest=longest)
    assert max(lengths, default=0) == (longest if longest > 3 else 0)


def test_a_prompt_passes_every_window_and_stays_affordable(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_module("gemma2")
    _, layers = probe_model(module, "float32", 32)
    assert comparison._tokens(module, layers, None) == 80 > 24 + 16, "the window has 24 tokens"
    monkeypatch.setattr(comparison, "TOKENS_USUAL", 10)
    assert comparison._tokens(module, layers, None) == 24 + 16
    monkeypatch.setattr(comparison, "OPERATIONS_MAX", 1)
    assert comparison._tokens(module, layers, None) == comparison.TOKENS_LEAST


def test_the_verdict_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path))
    good, bad = tiny_module("llama"), leaking(0.3)
    for module, name in ((good, "good"), (bad, "bad")):
        _, layers = probe_model(module, "float32", 32)
        for _ in range(2):
            if name == "good":
                compare_once(module, layers, "float32", name)
            else:
                with pytest.raises(UserError, match="carries more"):
                    compare_once(module, layers, "float32", name)
            module = copy.copy(module)
            monkeypatch.setattr(comparison, "compare_in_pieces", lambda *_: pytest.fail("compared again"))
        monkeypatch.undo()
        monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path))
    assert read_verdict(record_name(KIND, "good", "float32")) == ""
    assert "carries more" in (read_verdict(record_name(KIND, "bad", "float32")) or "")
    assert read_verdict(record_name(KIND, "good", "bfloat16")) is None
    record_file(record_name(KIND, "good", "float32")).write_text("{")
    assert read_verdict(record_name(KIND, "good", "float32")) is None


def test_a_refused_model_does_not_start(tmp_path: Path) -> None:
    folder = save_folder(tiny_module("zamba2"), tmp_path / "zamba")
    with pytest.raises(UserError, match="single tokens otherwise than several"):
        LLM(str(folder), dtype="float32", kv_memory="4MiB")
