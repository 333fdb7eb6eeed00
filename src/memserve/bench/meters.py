"""Weighing text with the tokenizer of a served model (level 4)."""

from __future__ import annotations

from collections.abc import Sequence

from memserve.workloads.tokens import TokenizerMeter


def model_meter(model: str) -> TokenizerMeter:
    """A meter that counts the tokens ``model`` sees (a folder, a .gguf file, a hub id or the bundled model's name).

    Loads the tokenizer, not the weights. :class:`UserError` where there is none.
    """
    from memserve.model.loading.loader import load_tokenizer
    from memserve.model.loading.sources import resolve_source

    tokenizer = load_tokenizer(resolve_source(model, "auto"))

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    return TokenizerMeter(encode, decode)
