"""Tokens and texts that nothing has cached: drawn from a seed, so that all contenders get the same ones."""

from __future__ import annotations

import random

Tokens = list[int]

FIRST_TOKEN, TOKENS_END = 1000, 40_000
"""Ids that each vocabulary here has, and that are no special tokens."""

_TEXT = """
    time people way day man thing woman life child world school state family student group country problem hand part
    place case week company system program question work government number night point home water room mother area
    money story fact month lot right study book eye job word business side kind head house service friend father power
    hour game line end member law car city community name president team minute idea body river stone cloud table light
    paper green bread glass
"""
WORDS = tuple(_TEXT.split())
"""Each is one token, with the blank before it, in English vocabularies."""


def random_tokens(count: int, rng: random.Random) -> Tokens:
    """``count`` tokens."""
    return [rng.randrange(FIRST_TOKEN, TOKENS_END) for _ in range(count)]


def token_prompts(count: int, tokens: int, rng: random.Random) -> list[Tokens]:
    """``count`` prompts of ``tokens`` tokens."""
    return [random_tokens(tokens, rng) for _ in range(count)]


def documents(count: int, tokens: int, seed: int) -> list[Tokens]:
    """The same of a seed."""
    return token_prompts(count, tokens, random.Random(seed))


def words(count: int, rng: random.Random) -> str:
    """A text of about ``count`` tokens."""
    return " ".join(rng.choices(WORDS, k=count))


def openings(count: int, rng: random.Random, tails: range = range(20, 300)) -> list[Tokens]:
    """Prompts that each share 64 to 512 tokens with some others, and have a tail of their own."""
    shared = [random_tokens(rng.choice((64, 200, 320, 512)), rng) for _ in range(max(1, count // 4))]
    return [rng.choice(shared) + random_tokens(rng.choice(tails), rng) for _ in range(count)]


def block_bytes(sizes: dict[str, int], dtype: str, block_tokens: int = 32) -> int:
    """KV of a block of all layers, by the fields of a model's ``config.json``."""
    head = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    element = 4 if dtype == "float32" else 2
    return sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * head * 2 * element * block_tokens
