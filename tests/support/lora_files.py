"""Random LoRA adapters as PEFT writes them, and the models that they make."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

KEY = "base_model.model."
RANK, ALPHA = 4, 8


def save_adapter(
    folder: Path, module: Any, targets: list[str], seed: int, *,
    rank: int = RANK, size: float = 0.3, tensors: dict[str, Any] | None = None, **said: Any,
) -> Path:  # fmt: skip
    """An adapter for the linears of ``module`` with a name in ``targets``, with weights of about ``size``. ``tensors``
    replaces or adds some, ``said`` is what its config says beyond the usual."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {}
    for path, linear in module.named_modules():
        if path.rpartition(".")[2] in targets:
            down = torch.randn((rank, linear.in_features), generator=generator)
            up = torch.randn((linear.out_features, rank), generator=generator)
            made |= {f"{KEY}{path}.lora_A.weight": size * down, f"{KEY}{path}.lora_B.weight": size * up}
    folder.mkdir(parents=True)
    save_file(made | (tensors or {}), folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": targets, "bias": "none", **said}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(module: Any, folder: Path, scale: float = ALPHA / RANK) -> Any:
    """A copy of ``module`` with the adapter's products added to its weights, as PEFT's ``merge_and_unload``."""
    from safetensors.torch import load_file

    whole, tensors = copy.deepcopy(module), load_file(folder / "adapter_model.safetensors")
    for key, down in tensors.items():
        if key.endswith(".lora_A.weight"):
            path = key.removeprefix(KEY).removesuffix(".lora_A.weight")
            whole.get_submodule(path).weight.data += scale * (tensors[key.replace("lora_A", "lora_B")] @ down)
    return whole
