"""How long a text may be that becomes tokens: bounds from before a tokenizer takes memory for each of them."""

from __future__ import annotations

from tokenizers import Tokenizer, pre_tokenizers

from memserve.api.served import ServedModel

TEXT_BYTES_MAX = 1 << 20


def text_bytes_max(model: ServedModel) -> int:
    """Of a text that is tokenized without a look at how many tokens it has: a token may be one byte."""
    return max(TEXT_BYTES_MAX, 8 * model.max_model_tokens)


def longest_token_bytes(tokenizer: Tokenizer) -> int | None:
    """Bytes of text in the longest token. None: unbounded, or some text becomes no token."""
    parts = repr(tokenizer.pre_tokenizer) + repr(tokenizer.decoder)
    if tokenizer.normalizer is not None or "ByteLevel" not in repr(tokenizer.decoder) or "Removed" in parts:
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # these take all whitespace beside them
        return None
    pieces = tokenizer.get_vocab(with_added_tokens=False)  # a character stands for a byte
    if not all(char in pieces for char in pre_tokenizers.ByteLevel.alphabet()):
        return None
    return max(*map(len, pieces), *(len(token.content.encode()) for token in added))
