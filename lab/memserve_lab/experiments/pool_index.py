"""Figure 10: the radix index beside indexes that are dictionaries of hashes.

Rivals, plain Python as an engine would write them:

* *hash chain*: a block's key is the hash of its tokens and the key before it (vLLM today).
* *hash of prefixes*: a block's key is the hash of every token up to its end (vLLM's automatic prefix caching at the
  time of the paper): the work grows with the square of the length.

Both trust their hashes; ours compares tokens. Each gets its tokens in its preferred form (a list, an array), computes
its keys once per request, and must give equal answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from memserve import _core
from memserve.base.config import PoolConfig
from memserve.base.errors import check
from memserve.base.types import TokenArray
from memserve.base.units import NS_PER_S
from memserve.kv.pool import BlockPool
from memserve_lab.experiments.pool_calls import TREE_PROMPT_TOKENS, Prompts
from memserve_lab.workloads.statistics import Spread, spread_of

POINT_S = 0.4
"""A point is repeated for at most this long, but at least :data:`ROUNDS_MIN` times."""
ROUNDS_MIN = 3
Keys = Callable[[Sequence[int], int], Iterator[int]]


@dataclass(frozen=True, slots=True)
class IndexPoint:
    """Times of an index for one request (figure 10)."""

    index: str
    prompt_tokens: int
    cached_ratio: float
    match_ns: Spread
    insert_ns: Spread
    check_ns: Spread
    """Match and insert together: the paper's "check index"."""


def chained_keys(tokens: Sequence[int], block_tokens: int) -> Iterator[int]:
    """A key for each whole block, from its tokens and the previous key."""
    key = 0
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        key = hash((key, tuple(tokens[end - block_tokens : end])))
        yield key


def prefix_keys(tokens: Sequence[int], block_tokens: int) -> Iterator[int]:
    """A key for each whole block, from all tokens up to its end."""
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        yield hash(tuple(tokens[:end]))


class Index(Protocol):
    """Which blocks of prompts are cached."""

    def plant_tokens(self, tokens: TokenArray) -> None:
        """Make all of ``tokens`` cached."""

    def take_tokens(self, tokens: TokenArray) -> None:
        """Set the prompt of the next calls, in the form that suits the index."""

    def match_tokens(self) -> int:
        """Number of the prompt's cached blocks."""

    def insert_tokens(self) -> int:
        """After :meth:`match_tokens`: cache the whole prompt. Returns the number of new blocks."""

    def forget_tokens(self) -> None:
        """Remove the whole prompt."""


class HashIndex(Index):
    """An :class:`Index` that is a dictionary from keys to blocks."""

    def __init__(self, keys_of: Keys, block_tokens: int) -> None:
        self._keys_of, self._block_tokens = keys_of, block_tokens
        self._blocks: dict[int, int] = {}
        self._tokens: list[int] = []
        self._keys: list[int] = []

    def plant_tokens(self, tokens: TokenArray) -> None:
        self.take_tokens(tokens)
        self.match_tokens()
        self.insert_tokens()

    def take_tokens(self, tokens: TokenArray) -> None:
        self._tokens = tokens.tolist()  # a list, as engines keep the tokens of a request

    def match_tokens(self) -> int:
        self._keys = list(self._keys_of(self._tokens, self._block_tokens))
        matched = 0
        for key in self._keys:
            if key not in self._blocks:
                break
            matched += 1
        return matched

    def insert_tokens(self) -> int:
        blocks, before = self._blocks, len(self._blocks)
        for index, key in enumerate(self._keys):
            blocks.setdefault(key, index)
        return len(blocks) - before

    def forget_tokens(self) -> None:
        for key in self._keys:
            del self._blocks[key]


class RadixOfPool(Index):
    """The :class:`Index` of a :class:`BlockPool`."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._tokens: TokenArray | None = None
        self._held = _core.BlockIds()

    def plant_tokens(self, tokens: TokenArray) -> None:
        self.take_tokens(tokens)
        self.insert_tokens()
        self._pool.release(self._held)

    def take_tokens(self, tokens: TokenArray) -> None:
        # allocate blocks now, outside the timed match: the rivals have none
        block_ids = self._pool.allocate_ids(len(tokens) // self._pool.block_tokens)
        assert block_ids is not None, "the pool has room for the prompt"
        self._tokens, self._held = tokens, block_ids

    def match_tokens(self) -> int:
        assert self._tokens is not None
        return self._pool.match("", self._tokens) // self._pool.block_tokens

    def insert_tokens(self) -> int:
        assert self._tokens is not None
        return self._pool.insert("", self._tokens, self._held, len(self._held))

    def forget_tokens(self) -> None:
        assert self._tokens is not None
        self._pool.release(self._held)
        self._pool.delete("", self._tokens)


def build_indexes(block_tokens: int, tree_prompts: int, tokens_max: int, prompts: Prompts) -> dict[str, Index]:
    """All contenders, with the same other prompts cached."""
    blocks = (tree_prompts * TREE_PROMPT_TOKENS + 4 * max(tokens_max, TREE_PROMPT_TOKENS)) // block_tokens
    indexes: dict[str, Index] = {
        "radix": RadixOfPool(BlockPool(PoolConfig(hbm_blocks=blocks), block_tokens, "bench")),
        "hash chain": HashIndex(chained_keys, block_tokens),
        "hash of prefixes": HashIndex(prefix_keys, block_tokens),
    }
    for _ in range(tree_prompts):
        prompt = prompts.fresh_prompt(TREE_PROMPT_TOKENS)
        for index in indexes.values():
            index.plant_tokens(prompt)
    return indexes


def race(block_tokens: int, works: Sequence[tuple[int, float]], tree_prompts: int, rounds: int) -> Iterator[IndexPoint]:
    """Time every index with every work of ``(prompt tokens, cached ratio)``, taking turns."""
    prompts = Prompts(9)
    indexes = build_indexes(block_tokens, tree_prompts, max(tokens for tokens, _ in works), prompts)
    for tokens, ratio in works:
        spent: dict[str, list[tuple[int, int]]] = {name: [] for name in indexes}
        begin_ns = time.perf_counter_ns()
        for turn in range(rounds):
            if turn >= ROUNDS_MIN and time.perf_counter_ns() - begin_ns > POINT_S * NS_PER_S:
                break
            prompt = prompts.fresh_prompt(tokens)
            for name, index in indexes.items():
                spent[name].append(_one(index, prompt, block_tokens, ratio))
        for name, times in spent.items():
            columns = ([match for match, _ in times], [insert for _, insert in times], [sum(pair) for pair in times])
            yield IndexPoint(name, tokens, ratio, *(spread_of(column) for column in columns))


def _one(index: Index, prompt: TokenArray, block_tokens: int, ratio: float) -> tuple[int, int]:
    """Times in ns of match and insert for a prompt with a cached first part; restores the index."""
    blocks = len(prompt) // block_tokens
    shared = round(blocks * ratio)
    if shared:
        index.plant_tokens(prompt[: shared * block_tokens])
    index.take_tokens(prompt)
    begin_ns = time.perf_counter_ns()
    matched = index.match_tokens()
    matched_ns = time.perf_counter_ns()
    added = index.insert_tokens()
    inserted_ns = time.perf_counter_ns()
    check((matched, added) == (shared, blocks - shared), f"{matched} and {added} blocks of {shared} and {blocks}")
    index.forget_tokens()
    return matched_ns - begin_ns, inserted_ns - matched_ns
