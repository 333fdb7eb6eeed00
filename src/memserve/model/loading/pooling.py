"""Models that embed: what their files say about it, and a module that gives hidden states instead of logits.

A model that embeds is served with its output head replaced by the identity: what the forward gives of a row is the
state behind its last norm, and everything before it (chunks, cached prefixes, batches) is as for a model that
generates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec import structs

from memserve.base.errors import UserError
from memserve.base.types import Pooling

KINDS = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_ALTERS_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "scale_emb")
"""Fields of configs by which logits are more than the head's product with the last state."""


def pooling_of(folder: Path, choice: str) -> Pooling | None:
    """How the model in ``folder`` embeds: as ``choice`` of ``--pooling`` says, ``auto``: as its files say. None: it
    does not. Raises :class:`UserError` for files that ask for what is not served."""
    if choice == "none":
        return None
    modules = _read_json(folder / "modules.json")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules or []]
    normalizes = "Normalize" in kinds or not modules
    if choice != "auto":
        return Pooling(choice, normalizes, _sizes(folder), prompts=_prompts(folder))
    if "Pooling" not in kinds:
        return None
    settings = _read_json(folder / str(modules[kinds.index("Pooling")].get("path", "1_Pooling")) / "config.json") or {}
    modes = [name for name, is_set in settings.items() if name.startswith("pooling_mode_") and is_set is True]
    if len(modes) != 1 or modes[0] not in KINDS or set(kinds) - {"Transformer", "Pooling", "Normalize"}:
        features = ", ".join([*modes, *(kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize"))])
        hint = "mean and last token pooling are served; --pooling none serves it without embeddings"
        raise UserError(f"this model embeds by {features or 'no pooling'}", hint=hint, param="pooling")
    return Pooling(KINDS[modes[0]], normalizes, _sizes(folder), prompts=_prompts(folder))


def _sizes(folder: Path) -> tuple[int, ...] | None:
    """Sizes to which embeddings may be cut: those of the config; empty: any. None: they may not."""
    config = _read_json(folder / "config.json") or {}
    sizes = config.get("matryoshka_dimensions")
    if isinstance(sizes, list) and all(isinstance(size, int) for size in sizes):
        return tuple(sizes)
    return () if config.get("is_matryoshka") or "qwen3-embedding" in folder.name.casefold() else None


def _prompts(folder: Path) -> tuple[tuple[str, str], ...]:
    """What goes before a text, by what the text is: as sentence-transformers writes it."""
    prompts = (_read_json(folder / "config_sentence_transformers.json") or {}).get("prompts")
    known = prompts if isinstance(prompts, dict) else {}
    return tuple((name, text) for name, text in known.items() if isinstance(text, str))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path.name} cannot be read: {error}", hint="is the folder complete?") from None


def give_hidden_states(module: Any, pooling: Pooling, why_not: str) -> Pooling:
    """Let ``module`` give hidden states in the place of logits; returns ``pooling`` with their size. ``why_not``: what
    speaks against it where it is to run; empty: nothing. Raises :class:`UserError` where they would be others."""
    import torch
    from torch import nn

    head, config = module.get_output_embeddings(), module.config.get_text_config()
    altered = [name for name in _ALTERS_LOGITS if getattr(config, name, None) not in (None, 1, 1.0)]
    why_not = why_not or (f"its config has {altered[0]}" if altered else "")
    if type(head) is not nn.Linear or why_not:
        hint = "serve it with --pooling none"
        raise UserError(
            f"this model cannot embed here: {why_not or 'its head is no linear'}", hint=hint, param="pooling"
        )
    states = nn.Linear(head.in_features, head.in_features, bias=False, dtype=head.weight.dtype)
    with torch.no_grad():
        states.weight.copy_(torch.eye(head.in_features))
    module.set_output_embeddings(states.requires_grad_(False))
    return structs.replace(pooling, size=head.in_features)
