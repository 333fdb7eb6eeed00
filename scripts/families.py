"""Every family that answers with text and that the installed transformers can build small: served exactly, or refused?

    python scripts/families.py [NAME ...] [--json FILE] [--docs FILE] [--jobs 2] [--limit-s 120] [--workers N]

A family's own configuration is made small (4 layers, hidden size 64, windows and switches of 24 to 64 tokens) and gets
random weights in float32. What the model itself answers greedily, without a cache, is compared with memserve's answers
to prompts that end within a block, beyond one, and beyond every window: cold, and again with the cache filled; in steps
as they come, and in chunks of 24 tokens. Each family is a process of its own, with a limit of time and of memory. Ends
with 1 if any answer is wrong. ``--docs`` writes docs/reference/FAMILIES.md. ``--workers``: each by so many
(``--tensor-parallel``); no table is written of that.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXACT, UP_TO, REFUSED, WRONG, NOT_BUILT, BROKE = (
    "served", "served up to a length", "refused", "WRONG", "not built", "BROKE"
)  # fmt: skip
VOCAB, HIDDEN, CONTEXT, WINDOW, SWITCH = 131, 64, 256, 24, 64
PROMPTS = (5, 40, 130)
NEW_TOKENS = 20
CHUNK_TOKENS = 24
MEMORY_BYTES = 12 << 30
"""Of address space."""
MODEL_BYTES = 1 << 30
"""Of a model that is small."""

SMALL = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "model_dim", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), CONTEXT),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1), "eos_token_id": 2, "pad_token_id": 0,
    "head_dim": 16, "rotary_dim": 8, "query_pre_attn_scalar": 16,
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size", "local_attention"), WINDOW),
    "attention_chunk_size": SWITCH, "max_window_layers": 2,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "first_k_dense_replace", "n_group", "topk_group"), 1),
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "index_head_dim": 16, "index_n_heads": 4, "index_topk": 16,
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "state_size": 16, "n_groups": 1,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "mamba_dt_rank": 8, "use_mamba_kernels": False,
    "expand": 1, "mamba_expand": 1, "time_step_rank": 8, "n_mamba_heads": 4,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "lru_width": HIDDEN, "intermediate_size_mlp": 128, "block_multiple_of": 32, "num_nextn_predict_layers": 0,
    "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 1, "laurel_rank": 8, "altup_num_inputs": 2,
}  # fmt: skip
"""Sizes by the names that configurations have for them. Others stay as they are."""
KINDS = dict.fromkeys(("lfm2", "lfm2_moe"), ("conv", "full_attention"))
"""Kinds of layers of families whose configurations name none."""
MROPE = [4, 2, 2]
"""How the pairs of a head's rotated sizes are dealt to time, height and width: of text all three are the position."""


IMAGES = {
    **dict.fromkeys(("embed_dim", "out_hidden_size", "projection_dim", "output_hidden_size"), HIDDEN),
    **dict.fromkeys(("depth", "vision_feature_layer"), 1), "image_size": 28, "patch_size": 14,
    "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0], "window_size": 56,
}  # fmt: skip
"""Sizes of what looks at images, as ``SMALL``."""


def shrunk(config_class: Any) -> Any:
    """A configuration of ``config_class`` with small sizes: of its text alone, where that is a causal model of its own;
    else of all its parts. Raises what transformers raises."""
    from transformers import AutoModelForCausalLM as Causal

    usual = config_class()
    text = usual.get_text_config()
    if text is usual:
        return small_text(usual)
    if config_class in Causal._model_mapping:
        return small_text(text)
    # where it is not said, some take sections of much larger heads
    text.rope_parameters = {**(getattr(text, "rope_parameters", None) or {}), "mrope_section": MROPE}
    parts = {name: getattr(usual, name, None) for name in type(usual).sub_configs}
    small = {
        name: (small_text(part) if part is text else small_images(part)).to_dict()
        for name, part in parts.items()
        if part is not None
    }
    return config_class(
        **small, **{name: 1 for name in ("image_token_id", "image_token_index") if hasattr(usual, name)}
    )


def small_images(usual: Any) -> Any:
    """As ``usual``, a configuration of what looks at images, with small sizes."""
    sizes = {**SMALL, **IMAGES, "num_hidden_layers": 1}
    return type(usual)(**{name: value for name, value in sizes.items() if name in usual.to_dict()})


def small_text(usual: Any) -> Any:
    """As ``usual``, a configuration of what answers, with small sizes."""
    usual_fields = usual.to_dict()
    small = {name: value for name, value in SMALL.items() if name in usual_fields or hasattr(usual, name)}
    if usual_fields.get("sliding_window", 0) is None:
        del small["sliding_window"]
    layers = next((small[name] for name in ("num_hidden_layers", "n_layer", "n_layers") if name in small), 4)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type", "block_types"):
        if isinstance(kinds := usual_fields.get(name), list) and kinds:
            distinct = list(dict.fromkeys(kinds))
            small[name] = (distinct * layers)[:layers]
    if usual.model_type in KINDS:
        small["layer_types"] = [*KINDS[usual.model_type]] * 2
    if "num_key_value_heads" in small and usual_fields.get("kv_lora_rank"):
        small["num_key_value_heads"] = 4
    if usual_fields.get("kv_lora_rank") and "qk_rope_head_dim" in small and "head_dim" in small:
        small["head_dim"] = small["qk_rope_head_dim"]  # of what is rotated
    if "mrope_section" in (rotary := usual_fields.get("rope_parameters") or {}):
        small["rope_parameters"] = {**rotary, "mrope_section": MROPE}
    return type(usual)(**small)


def build(name: str, folder: Path) -> Any:
    """Write the small model of a family, with a tokenizer of words; returns the module."""
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from memserve.model.loading.skeleton import auto_class

    torch.manual_seed(1)
    config = shrunk(CONFIG_MAPPING[name])
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    auto_model = auto_class(config)
    module = auto_model.from_config(config, attn_implementation="eager").float().eval()
    size_bytes = sum(parameter.nbytes for parameter in module.parameters())
    if size_bytes > MODEL_BYTES:
        raise ValueError(f"its configuration made small still has weights of {size_bytes / 1e9:.1f} GB")
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    module.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", unk_token="w0")
    tokenizer.save_pretrained(folder)
    return auto_model.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def own_answers(module: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What the module answers greedily, everything computed anew for each token."""
    import torch

    answers = []
    for tokens in prompts:
        ids = torch.tensor([tokens])
        for _ in range(NEW_TOKENS):
            with torch.inference_mode():
                logits = module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        answers.append(ids[0, len(tokens) :].tolist())
    return answers


def judge(name: str, folder: Path, workers: int) -> tuple[str, str]:
    """One of the words above, and why."""
    import torch

    from memserve import LLM, SamplingParams, UserError

    greedy = SamplingParams(temperature=0)
    try:
        module = build(name, folder)
        draws = torch.Generator().manual_seed(7)
        prompts = [torch.randint(3, VOCAB, (count,), generator=draws).tolist() for count in PROMPTS]
        expected = own_answers(module, prompts)
    except Exception as error:
        return NOT_BUILT, _in_a_line(error)
    wrong, total, longest = 0, 0, ""
    for more in ({}, {"max_step_tokens": CHUNK_TOKENS}):
        try:
            options = {"dtype": "float32", "kv_memory": "64MiB", "threads": workers, "tensor_parallel": workers}
            llm = LLM(str(folder), **options, **more)
        except UserError as error:
            return REFUSED, error.message
        with llm:
            for _ in range(2):
                for prompt, answer in zip(prompts, expected, strict=True):
                    try:
                        outputs = llm.generate([prompt], greedy, max_tokens=NEW_TOKENS, ignore_eos=True)
                    except UserError as error:
                        longest = error.message
                        continue
                    total += 1
                    wrong += list(outputs[0].outputs[0].tokens) != answer
    if wrong:
        return WRONG, f"{wrong} of {total} answers differ"
    return (UP_TO, longest) if longest else (EXACT, f"{total} of {total} answers")


def _in_a_line(error: BaseException) -> str:
    kind = type(error).__name__.removesuffix("Error")  # of which one would read as a promise in a page of ours
    return f"{kind}: {' '.join(str(error).split())}"[:200]


def _child(name: str, workers: int, answers: Any) -> None:
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1), os.dup2(sink, 2)
    with tempfile.TemporaryDirectory(prefix="family-") as folder:
        os.environ["MEMSERVE_CACHE_DIR"] = f"{folder}/cache"
        try:
            outcome = judge(name, Path(folder) / name, workers)
        except BaseException as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            outcome = BROKE, f"{_in_a_line(error)} ({Path(frame.filename).name}:{frame.lineno})"
        answers.send(outcome)
    os._exit(0)


def tried(name: str, limit_s: float, workers: int) -> dict[str, Any]:
    """What has become of a family, in a process of its own."""
    began = time.monotonic()
    ours, far_end = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(name, workers, far_end))
    process.start()
    far_end.close()
    outcome = BROKE, f"no answer within {limit_s:.0f} s"
    try:
        if ours.poll(limit_s):
            outcome = ours.recv()
    except EOFError:
        process.join(5)
        outcome = BROKE, f"its process ended with {process.exitcode}"
    process.kill()
    process.join()
    return {"family": name, "outcome": outcome[0], "why": outcome[1], "seconds": round(time.monotonic() - began, 1)}


def page(rows: list[dict[str, Any]], version: str) -> str:
    words = EXACT, UP_TO, REFUSED, WRONG, BROKE, NOT_BUILT
    counts = [(sum(row["outcome"] == word for row in rows), word) for word in words]
    summary = ", ".join(f"{count} {word}" for count, word in counts if count)
    lines = [
        "# Families of models", "",
        "Written by `python scripts/families.py --docs docs/reference/FAMILIES.md`: every family of transformers "
        f"{version} that answers with text, those of images and text too, built small from its own configuration: "
        f"{summary}. *Served*: greedy answers in float32 are those of the model itself, token for token: within a "
        "block, beyond it and beyond every window, in chunks, and from the cache. A model is compared likewise at its "
        "first start (`memserve doctor`).",
        "",
    ]  # fmt: skip
    for word in words:
        rows_chosen = [row for row in rows if row["outcome"] == word]
        if not rows_chosen:
            continue
        lines += [f"## {word[0].upper()}{word[1:]}: {len(rows_chosen)}", ""]
        if word == EXACT:
            lines += [", ".join(f"`{row['family']}`" for row in rows_chosen), ""]
            continue
        lines += ["| Family | Why |", "| --- | --- |"]
        lines += [f"| `{row['family']}` | {row['why'].replace('|', chr(92) + '|')} |" for row in rows_chosen] + [""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    if options.docs is not None and options.workers > 1:
        parser.error("--docs is about one worker")
    warnings.filterwarnings("ignore")
    import transformers
    from transformers.models.auto import modeling_auto as auto

    import_module("memserve.model.loading.loader")  # once, for all children
    transformers.logging.set_verbosity_error()
    names = options.names or list(
        dict.fromkeys((*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
    )
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda name: tried(name, options.limit_s, options.workers), names):
            rows.append(row)
            print(f"{row['family']:28} {row['outcome']:10} {row['why'][:150]} ({row['seconds']} s)", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.docs is not None:
        options.docs.write_text(page(rows, transformers.__version__))
    return int(any(row["outcome"] in (WRONG, BROKE) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
