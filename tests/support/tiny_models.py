"""Tiny random models of several families, and the plans that drive them through the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memserve import LLM
from memserve.base.config import InstanceConfig, PoolConfig, SchedulerConfig
from memserve.base.types import SamplingParams, StopParams
from memserve.instance.events import OpenSequence, StepPlan
from memserve.model.device import ModelDevice
from memserve.model.loading.loader import LoadedModel
from memserve.model.loading.probe import probe_model
from memserve.model.states.layers import states_of

VOCAB = 131
CONTEXT_TOKENS = 256
CHUNK_TOKENS = 32
"""Of Mamba-2's scan, which pads a sequence to whole chunks: of the usual 256 no prompt here would have two."""
GREEDY = SamplingParams(temperature=0)


def _config(family: str, sizes: dict[str, int]) -> Any:
    import transformers as t

    common = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    common |= {"max_position_embeddings": CONTEXT_TOKENS, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    gated = common | {"num_key_value_heads": 2, "intermediate_size": 48}
    if family in (*STATEFUL, "zamba2"):
        return _stateful_config(family, common, gated, sizes)
    match family:
        case "llama":
            return t.LlamaConfig(**(gated | {"tie_word_embeddings": True} | sizes))
        case "qwen3":
            return t.Qwen3Config(**(gated | {"head_dim": 16} | sizes))
        case "qwen3_moe":  # experts in every layer
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
            return t.Qwen3MoeConfig(**(gated | experts | sizes))
        case "gemma":
            return t.GemmaConfig(**(gated | {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"} | sizes))
        case "gemma2":  # window on every other layer, soft caps on scores and logits
            gated |= {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}
            gated |= {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
            return t.Gemma2Config(**(gated | sizes))
        case "gpt_oss":  # attention sinks, windows, experts
            gated |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, "head_dim": 16}
            return t.GptOssConfig(**(gated | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}} | sizes))
        case "gemma3n":  # half of the layers read the KV of others, some through a window
            layers = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
            layers |= {"num_hidden_layers": 6, "num_kv_shared_layers": 3, "sliding_window": 24, "head_dim": 16}
            layers |= {"hidden_size_per_layer_input": 16, "laurel_rank": 8, "altup_num_inputs": 2}
            layers |= {"vocab_size_per_layer_input": VOCAB, "activation_sparsity_pattern": [0.0] * 6}
            return t.Gemma3nTextConfig(**(gated | layers | sizes))
        case "gemma4":  # fewer and wider heads where all is read; keys that are values as well
            layers = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
            layers |= {"num_hidden_layers": 6, "sliding_window": 24, "head_dim": 16, "global_head_dim": 32}
            layers |= {"num_key_value_heads": 4, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
            layers |= {"hidden_size_per_layer_input": 0}
            return t.Gemma4TextConfig(**(gated | layers | sizes))
        case "llama4":  # chunks, and layers without positions that read everything; experts
            layers = {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "attention_chunk_size": 48, "head_dim": 16}
            layers |= {"num_local_experts": 4, "intermediate_size_mlp": 48, "floor_scale": 40}
            return t.Llama4TextConfig(**(gated | layers | sizes))
        case "mistral":  # a window on every layer
            return t.MistralConfig(**(gated | {"num_hidden_layers": 5, "sliding_window": 24, "head_dim": 16} | sizes))
        case "mixtral":  # experts
            return t.MixtralConfig(**(gated | {"num_local_experts": 4, "num_experts_per_tok": 2} | sizes))
        case "phi3":  # q, k, v in one linear, gate and up in another
            return t.Phi3Config(**(gated | sizes))
        case "longrope":  # positions that change for prompts of more than 64 tokens
            rope = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
            return t.Phi3Config(**(gated | {"original_max_position_embeddings": 64, "rope_scaling": rope} | sizes))
        case "dynamic":  # other positions with each length beyond 64
            rope = {"rope_type": "dynamic", "factor": 4.0}
            return t.LlamaConfig(**(gated | {"max_position_embeddings": 64, "rope_scaling": rope} | sizes))
        case "deepseek_v2":  # latents; a dense layer, then experts
            return t.DeepseekV2Config(**(gated | _LATENTS | _EXPERTS | {"topk_method": "greedy"} | sizes))
        case "deepseek_v3":
            experts = _EXPERTS | {"n_group": 2, "topk_group": 1}
            return t.DeepseekV3Config(**(gated | _LATENTS | experts | sizes))
        case "longcat_flash":  # two layers of attention in each
            experts = {
                "num_layers": 2,
                "n_routed_experts": 4,
                "zero_expert_num": 2,
                "moe_topk": 2,
                "ffn_hidden_size": 48,
            }
            experts |= {"expert_ffn_hidden_size": 24}
            layers = {name: size for name, size in common.items() if name != "num_hidden_layers"}
            return t.LongcatFlashConfig(**(layers | _LATENTS | experts | sizes))
        case "minicpm3":
            return t.MiniCPM3Config(**(gated | _LATENTS | sizes))
        case "glm4_moe_lite":
            return t.Glm4MoeLiteConfig(**(gated | _LATENTS | _EXPERTS | sizes))
        case "opt":
            return t.OPTConfig(**common, ffn_dim=48, word_embed_proj_dim=32)
        case "gpt_neox":
            return t.GPTNeoXConfig(**common, intermediate_size=48)
    raise ValueError(family)


_LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 8,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = ("deepseek_v2", "deepseek_v3", "minicpm3", "glm4_moe_lite")
"""Families whose layers keep latents."""
FAMILIES = ("llama", "qwen3", "gemma2", "gpt_oss", "opt", "gpt_neox", *LATENT)
STATEFUL = (
    "qwen3_5", "qwen3_next", "olmo_hybrid", "lfm2", "jamba", "mamba", "mamba2", "falcon_h1", "bamba",
    "granitemoehybrid",
)  # fmt: skip
"""Families with recurrent states, beside attention or without."""


def _stateful_config(family: str, common: dict[str, Any], gated: dict[str, Any], sizes: dict[str, Any]) -> Any:
    import transformers as t

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    delta = {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    delta |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    state = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": CHUNK_TOKENS}
    alone = {name: common[name] for name in ("vocab_size", "hidden_size", "eos_token_id", "bos_token_id")}
    alone |= {"num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0}
    match family:
        case "qwen3_5":  # gated delta nets
            return t.Qwen3_5TextConfig(**(gated | delta | {"linear_num_value_heads": 4, "head_dim": 16} | sizes))
        case "qwen3_next":
            experts |= {"shared_expert_intermediate_size": 24, "linear_num_value_heads": 4, "head_dim": 16}
            return t.Qwen3NextConfig(**(gated | delta | experts | sizes))
        case "olmo_hybrid":  # three convolutions a layer
            return t.OlmoHybridConfig(**(gated | delta | {"linear_num_value_heads": 2} | sizes))
        case "lfm2":  # short convolutions alone
            kinds = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}
            return t.Lfm2Config(**(gated | kinds | sizes))
        case "jamba":  # Mamba, which goes on from a state by one token
            layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1}
            return t.JambaConfig(**(gated | layers | {"mamba_d_state": 8, "mamba_dt_rank": 8} | sizes))
        case "mamba":  # nothing but states
            return t.MambaConfig(**(alone | {"time_step_rank": 8} | sizes))
        case "mamba2":
            return t.Mamba2Config(
                **(alone | {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": CHUNK_TOKENS} | sizes)
            )
        case "falcon_h1":  # a state beside the attention of each layer
            return t.FalconH1Config(**(gated | state | {"mamba_d_ssm": 64, "head_dim": 8} | sizes))
        case "bamba":
            return t.BambaConfig(**(gated | state | {"attn_layer_indices": [1]} | sizes))
        case "granitemoehybrid":
            layers = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24}
            layers |= {"layer_types": ["mamba", "attention", "mamba"]}
            return t.GraniteMoeHybridConfig(**(gated | state | layers | sizes))
    # single tokens are computed with other time steps than several
    layers = {"layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_d_state": 8, "n_mamba_heads": 4}
    layers |= {
        "chunk_size": CHUNK_TOKENS,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
        "mamba_headdim": 16,
        "adapter_rank": 8,
        "time_step_min": 0.1,
    }
    return t.Zamba2Config(**(gated | layers | sizes))


def tiny_module(family: str, seed: int = 0, **sizes: int) -> Any:
    """A random causal language model with weights large enough that its logits have opinions, and small enough, where a
    weight has many inputs, that these change from token to token. ``sizes``: other ones than usual, for families with
    gates."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(_config(family, sizes), attn_implementation="eager").float()
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1 or "sinks" in name:
            torch.nn.init.normal_(parameter, std=min(0.25, (3 / parameter.shape[-1]) ** 0.5))
    module.requires_grad_(False)
    return module.train(False)


def loaded(module: Any, dtype: str = "float32", block_tokens: int = 32, kv_dtype: str = "auto") -> LoadedModel:
    """``module`` as the loader would give it, without a tokenizer. The module is switched to our attention."""
    geometry, layers = probe_model(module, dtype, block_tokens)
    return LoadedModel(
        module=module,
        tokenizer=None,
        geometry=replace(geometry, kv_dtype=kv_dtype),
        fingerprint="tiny",
        name="tiny",
        max_model_tokens=CONTEXT_TOKENS,
        vocab_size=VOCAB,
        eos_token_ids=(2,),
        has_chat_template=False,
        device=torch.device("cpu"),
        dtype=getattr(torch, dtype),
        states=states_of(module).geometry,
        layers=tuple(layer.kept for layer in layers),
    ).lay_out_kv()


def save_folder(module: Any, folder: Path) -> Path:
    """Write ``module`` with a word-level tokenizer as a Hugging Face folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", unk_token="w0")
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def one_engine(folder: Path, kv_memory: str = "4MiB") -> Iterator[Callable[[list[int], int], str]]:
    """What one engine without a cache answers, greedily: to token ids, with so many tokens."""
    with LLM(str(folder), dtype="float32", kv_memory=kv_memory, threads=1, enable_prefix_caching=False) as llm:
        yield lambda tokens, count: llm.generate([tokens], GREEDY, max_tokens=count, ignore_eos=True)[0].text


def prompt(length: int, seed: int) -> np.ndarray:
    """``length`` random token ids, int32."""
    return np.random.default_rng(seed).integers(3, VOCAB, length).astype(np.int32)


def greedy_tokens(module: Any, tokens: np.ndarray, count: int, guess: Sequence[int] = ()) -> list[int]:
    """What the family's own eager path gives: ``count`` greedy tokens, the whole sequence computed anew each time.
    ``guess``: an answer that may be right. No token sees those behind it, so one computation shows how far it is; what
    is wrong is not taken."""
    module.set_attn_implementation("eager")
    found: list[int] = []
    while len(found) < count:
        ahead = list(guess[len(found) : count - 1]) if found == list(guess[: len(found)]) else []
        ids = torch.tensor([[*tokens.tolist(), *found, *ahead]])
        with torch.inference_mode():
            best = module(input_ids=ids, use_cache=False).logits[0, -1 - len(ahead) :].argmax(-1).tolist()
        right = next((at for at, token in enumerate(ahead) if token != best[at]), len(ahead))
        found += best[: right + 1]
    return found


def greedy_answers(
    module: Any,
    prompts: Sequence[Sequence[int] | np.ndarray],
    count: int,
    guesses: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """:func:`greedy_tokens` of several prompts; without ``guesses`` side by side in one batch: none sees what follows,
    so what fills up the shorter rows changes nothing. Not for positions that change with the length of all."""
    if guesses is not None:
        pairs = zip(prompts, guesses, strict=True)
        return [greedy_tokens(module, np.asarray(tokens), count, guess) for tokens, guess in pairs]
    module.set_attn_implementation("eager")
    ends = torch.tensor([len(tokens) for tokens in prompts])
    rows = torch.arange(len(prompts))
    ids = torch.ones(len(prompts), int(ends.max()) + count, dtype=torch.int64)
    for row, tokens in enumerate(prompts):
        ids[row, : len(tokens)] = torch.from_numpy(np.asarray(tokens, np.int64))
    for step in range(count):
        with torch.inference_mode():
            logits = module(input_ids=ids[:, : int(ends.max()) + step], use_cache=False).logits
        ids[rows, ends + step] = logits[rows, ends + step - 1].argmax(-1)
    return [ids[row, end : end + count].tolist() for row, end in enumerate(ends.tolist())]


class Driver:
    """A device and the plans for it, written by hand with little ink. Counts the steps."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        blocks: int = 64,
        dram_blocks: int = 8,
        lower_dtype: str = "auto",
        adapters: frozenset[str] = frozenset(),
        **options: Any,
    ) -> None:
        scheduler, pool = SchedulerConfig(max_running=8), PoolConfig(blocks, dram_blocks, lower_dtype=lower_dtype)
        config = InstanceConfig(CONTEXT_TOKENS, pool=pool, scheduler=scheduler, adapters=adapters)
        self.device = ModelDevice(model, config, **options)
        self.geometry, self.blocks, self.dram_blocks = model.geometry, blocks, dram_blocks
        self.steps = 0

    def step(self, rows: list[tuple[int, int, int, tuple[int, ...]]] = (), **parts: Any) -> Any:
        """Execute one plan; ``rows``: (slot, start, count, slots that sample)."""
        slots, starts, counts, samples = ([row[i] for row in rows] for i in range(4))
        plan = StepPlan(self.steps, slots=slots, starts=starts, counts=counts, sample_slots=samples, **parts)
        self.steps += 1
        finished = self.device.execute(plan)
        assert finished.step_id == plan.step_id
        return finished

    def decode(self, slot: int, position: int, count: int) -> list[int]:
        """``count`` steps of one token each, the first of which computes ``position``."""
        tokens = []
        for offset in range(count):
            tokens += self.step([(slot, position + offset, 1, (slot,))]).tokens
        return tokens


def sequence(
    slot: int, tokens: np.ndarray, blocks: list[int], sampling: SamplingParams = GREEDY, **more: Any
) -> OpenSequence:
    """An ``OpenSequence`` with tokens that are all prompt, unless told otherwise."""
    more = {"prompt_tokens": len(tokens), "index": 0, "stop": StopParams()} | more
    return OpenSequence(slot=slot, tokens=tokens, sampling=sampling, blocks=blocks, **more)
