"""Weighing text with the tokenizer of a served model (level 4)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memserve.bench.load.prompts import VOCAB_SIZE_DEFAULT
from memserve.workloads.tokens import TokenizerMeter

TOKENIZER_FILE = "tokenizer.json"


def weighing(model: str | None) -> tuple[TokenizerMeter | None, int]:
    """The meter of ``model``, and how many tokens it knows; no meter and the usual number where there is no model.

    ``model``: a folder, a .gguf file, a hub id or the bundled model's name. Loads the tokenizer, not the weights.
    :class:`UserError` where there is none.
    """
    if model is None:
        return None, VOCAB_SIZE_DEFAULT
    from memserve.model.loading.sources import resolve_source

    folder = resolve_source(model, "auto")
    file = folder.path / TOKENIZER_FILE
    if file.is_file():  # transformers would take seconds to be imported, and count the same
        return _weighing_by(file)
    from memserve.model.loading.loader import load_tokenizer

    tokenizer = load_tokenizer(folder)

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    return TokenizerMeter(encode, decode), len(tokenizer)


def _weighing_by(file: Path) -> tuple[TokenizerMeter, int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return TokenizerMeter(encode, decode), tokenizer.get_vocab_size()


def model_meter(model: str) -> TokenizerMeter:
    """A meter that counts the tokens ``model`` sees. Raises as :func:`weighing` does."""
    meter, _ = weighing(model)
    assert meter is not None
    return meter
