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
    rank: int = RANK, size: float = 0.3, tensors: dict[str, Any] | None = None, dora: bool = False,
    saves: tuple[str, ...] = (), **said: Any,
) -> Path:  # fmt: skip
    """An adapter for the linears of ``module`` with a name in ``targets``, with weights of about ``size``. ``tensors``
    replaces or adds some, ``said`` is what its config says beyond the usual. ``dora``: with magnitudes; ``saves``:
    paths of modules that it has weights of its own for."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {}
    for path, linear in module.named_modules():
        if path.rpartition(".")[2] in targets:
            down = torch.randn((rank, linear.in_features), generator=generator)
            up = torch.randn((linear.out_features, rank), generator=generator)
            made |= {f"{KEY}{path}.lora_A.weight": size * down, f"{KEY}{path}.lora_B.weight": size * up}
            if dora:
                lengths = linear.weight.detach().float().norm(dim=1)
                made[f"{KEY}{path}.lora_magnitude_vector"] = lengths * (1.5 + torch.rand(len(up), generator=generator))
    for path in saves:
        weight = module.get_submodule(path).weight.detach().float()
        made[f"{KEY}{path}.weight"] = weight + 0.5 * weight.std() * torch.randn(weight.shape, generator=generator)
    if dora or saves:
        said = {"use_dora": dora, "modules_to_save": [path.rpartition(".")[2] for path in saves], **said}
    folder.mkdir(parents=True)
    save_file(made | (tensors or {}), folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": targets, "bias": "none", **said}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(module: Any, folder: Path, scale: float = ALPHA / RANK) -> Any:
    """A copy of ``module`` with the adapter's products added to its weights, as PEFT's ``merge_and_unload``: with
    magnitudes (DoRA) the sum has rows of those lengths."""
    from safetensors.torch import load_file

    whole, tensors = copy.deepcopy(module), load_file(folder / "adapter_model.safetensors")
    for key, down in tensors.items():
        if key.endswith(".lora_A.weight"):
            path = key.removeprefix(KEY).removesuffix(".lora_A.weight")
            weight = whole.get_submodule(path).weight.data
            weight += scale * (tensors[key.replace("lora_A", "lora_B")] @ down)
            if (lengths := tensors.get(f"{KEY}{path}.lora_magnitude_vector")) is not None:
                weight *= (lengths / weight.norm(dim=1))[:, None]
        elif key.endswith(".weight") and not key.endswith(".lora_B.weight"):
            part = whole.get_submodule(key.removeprefix(KEY).removesuffix(".weight"))
            part.weight = torch.nn.Parameter(down)  # untied, where it was tied
    return whole
