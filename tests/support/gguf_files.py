"""GGUF files of tiny models."""

from __future__ import annotations

import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def write_gguf(module: Any, path: Path, *, with_head: bool = False) -> Path:
    """A GGUF file of a tiny Llama, LFM2, Mamba, or Qwen3 with experts: quantised matrices (Q8_0), everything else
    float32. Without its output head: that is tied to the embedding."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    def tensors() -> Iterator[tuple[str, Any, Any]]:
        weights = {name: value for name, value in module.state_dict().items()
                   if with_head or name != "lm_head.weight"}  # fmt: skip
        for name, value in weights.items():
            for part, array in _parts(name, value.numpy()):
                if array.ndim >= 2 and array.shape[-1] % 32 == 0:
                    yield part, quantize(array, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0
                else:
                    yield part, array, None

    return write_tensors(module.config, tensors(), path)


def _parts(name: str, array: Any) -> list[tuple[str, Any]]:
    """Gates and ups of experts are tensors of their own; convolutions have a channel each."""
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        return [(name, array[:, 0])]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", array)]
    if name.endswith("A_log"):
        return [(name, -np.exp(array))]
    head, is_joined, _ = name.partition("mlp.experts.gate_up_proj")
    if not is_joined:
        return [(name, array)]
    gate, up = array.reshape(len(array), 2, -1, array.shape[-1]).swapaxes(0, 1)
    return [(f"{head}ffn_gate_exps.weight", gate), (f"{head}ffn_up_exps.weight", up)]


def write_tensors(config: Any, tensors: Iterable[tuple[str, Any, Any]], path: Path) -> Path:
    """A GGUF file of a Llama, or of another model of transformers whose name llama.cpp writes alike, with these tensors
    (name, array, kind of its bytes), and a vocabulary of as many words."""
    from gguf import MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map

    kind = config.model_type.replace("_", "")
    table = get_tensor_name_map(next(k for k, name in MODEL_ARCH_NAMES.items() if name == kind), 99)
    writer = GGUFWriter(path, kind)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_key_length(config.head_dim)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    if kind == "mamba":
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
        writer.add_ssm_conv_kernel(config.conv_kernel)
        writer.add_ssm_inner_size(config.intermediate_size)
        writer.add_ssm_state_size(config.state_size)
        writer.add_ssm_time_step_rank(config.time_step_rank)
    else:
        _add_attention(writer, config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["w", "1", *(f"w{i}" for i in range(2, config.vocab_size - 1)), "w1"])
    writer.add_token_merges(["w 1"])
    writer.add_eos_token_id(2)
    for name, array, kind in tensors:
        stem, dot, end = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
        stem = table.get_name(stem) or stem.replace("model.layers.", "blk.")
        writer.add_tensor(stem + dot + end, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_attention(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(_kv_heads(config))
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    if hasattr(config, "conv_L_cache"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_rope_freq_base(10000.0)


def _kv_heads(config: Any) -> int | list[int]:
    """By layer, where some layers do not attend."""
    kinds = getattr(config, "layer_types", None) or []
    if "conv" not in kinds:
        return int(config.num_key_value_heads)
    return [config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds]


def convert_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are converted in this process, which has torch: a process of its own takes 2.5 s of CPU to begin. For tests
    of what a file becomes; what its process is, others test."""
    from memserve.model.loading import conversion, sources

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        said = ""
        with pytest.MonkeyPatch.context() as child, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what the process says only the last line is read
            child.setattr(conversion, "leave_compiler_out", lambda device: None)
            child.setattr(sys, "argv", command[command.index(conversion.__name__) :])
            child.setenv(conversion._NO_WAITING_READS, "1")
            try:
                conversion.main()
            except SystemExit as refused:
                said = str(refused)
            except Exception:
                said = traceback.format_exc()
        return subprocess.CompletedProcess(command, int(bool(said)), "", said)

    monkeypatch.setattr(sources, "subprocess", _Here(run))


class _Here:
    """Stands for the module ``subprocess``."""

    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, run: Any) -> None:
        self.run = run
