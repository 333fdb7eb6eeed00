"""Models of images and text: their text is served exactly, and what looks at images is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from memserve import LLM, SamplingParams
from memserve.cli.doctor import unservable
from memserve.model.loading.checkpoint import load_module, text_weights
from memserve.model.loading.skeleton import auto_class
from tiny_models import VOCAB, prompt, save_folder

TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
DEPTH = {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "hidden_size": 32, "intermediate_size": 64}
THREE_POSITIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral3": ("Mistral3Config", {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 16},
    }),
    "llava": ("LlavaConfig", {
        "text_config": TEXT | {"model_type": "llama"}, "vision_config": VISION | {"model_type": "clip_vision_model"},
    }),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", {
        "text_config": TEXT | THREE_POSITIONS, "vision_config": DEPTH | {"fullatt_block_indexes": [0]},
    }),
    "qwen3_vl": ("Qwen3VLConfig", {
        "text_config": TEXT | THREE_POSITIONS, "vision_config": DEPTH | {"deepstack_visual_indexes": [0]},
    }),
    "gemma3": ("Gemma3Config", {
        "text_config": TEXT | {"sliding_window": 24, "query_pre_attn_scalar": 16}, "vision_config": VISION,
    }),
}  # fmt: skip
LENGTHS = (5, 40, 130)  # beyond a block, and beyond every window


@pytest.fixture(scope="module", params=CONFIGS)
def images_and_text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a small random model, and the model as transformers reads it."""
    name, parts = CONFIGS[request.param]
    torch.manual_seed(3)
    config = getattr(transformers, name)(**parts)
    module = auto_class(config).from_config(config).float()
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    folder = save_folder(module, tmp_path_factory.mktemp(request.param) / request.param)
    return folder, auto_class(config).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def test_text_of_models_with_images_is_exact(images_and_text: tuple[Path, Any]) -> None:
    """Cold, and with the prompt cached; in chunks."""
    folder, module = images_and_text
    assert unservable(folder) is None
    prompts = [prompt(length, length).tolist() for length in LENGTHS]
    expected = []
    for tokens in prompts:
        ids = torch.tensor([tokens])
        for _ in range(8):
            with torch.inference_mode():
                ids = torch.cat([ids, module(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        expected.append(ids[0, len(tokens) :].tolist())
    with LLM(str(folder), dtype="float32", kv_memory="16MiB", threads=1, max_step_tokens=24) as llm:
        for cached in (False, True):
            outputs = llm.generate(prompts, SamplingParams(temperature=0), max_tokens=8, ignore_eos=True)
            assert [list(output.outputs[0].tokens) for output in outputs] == expected
            assert (outputs[-1].cached_tokens > 0) is cached


def test_weights_for_images_are_left_out(images_and_text: tuple[Path, Any]) -> None:
    folder, whole = images_and_text
    module = load_module(folder, folder.name, torch.float32)
    names = {name for name, _ in module.named_parameters()}
    assert not [name for name in names if "vis" in name or "multi_modal" in name]
    assert {name for name, _ in whole.named_parameters()} - names
    tied = module.get_output_embeddings().weight is module.get_input_embeddings().weight
    assert tied or sum(value.numel() for value in module.parameters()) == text_weights(folder)[0]
