"""Token ids for the index: fresh ones, and such as share their first blocks with another prompt (level 4)."""

from __future__ import annotations

import numpy as np

from memserve.mempool.pool import BlockPool
from memserve.types import TokenArray

VOCABULARY = 49_152
TREE_PROMPT_TOKENS = 4096


class Prompts:
    """Random prompts, the same ones for the same seed; no two begin alike unless that is asked for."""

    def __init__(self, seed: int = 5) -> None:
        self._rng = np.random.default_rng(seed)

    def fresh(self, tokens: int) -> TokenArray:
        """``tokens`` ids, int32, never given before."""
        return self._rng.integers(1, VOCABULARY, tokens, dtype=np.int32)

    def sharing(self, tokens: TokenArray, shared: int) -> TokenArray:
        """As long as ``tokens``; the first ``shared`` are the same, the next one differs for sure."""
        other = self.fresh(len(tokens))
        other[:shared] = tokens[:shared]
        if shared < len(tokens):
            other[shared] = tokens[shared] % (VOCABULARY - 1) + 1
        return other


def plant_tree(pool: BlockPool, prompts: Prompts, count: int, tokens: int = TREE_PROMPT_TOKENS) -> list[TokenArray]:
    """Let the index hold ``count`` other prompts, as in a cache that is in use; what was planted."""
    planted = [prompts.fresh(tokens) for _ in range(count)]
    for prompt in planted:
        blocks = pool.allocate_ids(tokens // pool.block_tokens)
        assert blocks is not None, "the pool was made for them"
        pool.insert("", prompt, blocks, len(blocks))
        pool.release(blocks)
    return planted
