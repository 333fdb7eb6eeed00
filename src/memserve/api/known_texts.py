"""Token ids of texts that clients send again: a chat's next turn begins with all earlier ones.

A tokenizer cuts a text at its added tokens (``<|im_end|>``) before it does anything else. Where nothing else looks
across such a cut, the ids of a text are those of its pieces in a row, each up to an added token and with it; a piece
that was tokenized before need not be tokenized again. What lies behind the last added token is not kept: it is an
answer's beginning.

Each owner (a tenant, and the salt of its request) has pieces of its own, so the time that tokenizing takes tells no
client what another one has sent.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from memserve.types import TokenArray
from memserve.units import MIB

BYTES_MAX = 32 * MIB
"""Of all pieces with their ids: about 3 million tokens of English text."""
_ENTRY_BYTES = 400
"""Of a piece, beside its text and its ids."""

Owner = tuple[str, str]
"""Tenant and salt."""


class KnownTexts:
    """Tokenizes texts piece by piece, and keeps the pieces used last. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, bytes_max: int = BYTES_MAX) -> None:
        self._tokenizer, self._bytes_max = tokenizer, bytes_max
        self._cuts = cuts_of(tokenizer)
        self._pieces: OrderedDict[tuple[Owner, str], TokenArray] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self.held_bytes = 0

    def tokenize(self, text: str, owner: Owner) -> list[TokenArray] | None:
        """The ids of ``text`` without those that a tokenizer puts around it, as int32 arrays to be joined. ``None``:
        the text has no piece that could be known, or the tokenizer looks across pieces."""
        ends = [found.end() for found in self._cuts.finditer(text)] if self._cuts is not None else []
        if not ends:
            return None
        texts = [text[first:end] for first, end in zip([0, *ends], [*ends, len(text)], strict=True)]
        found: list[TokenArray | None]
        with self._lock:
            found = [self._known((owner, piece)) for piece in texts[:-1]]
        missing = [at for at, ids in enumerate((*found, None)) if ids is None]
        encoded = self._tokenizer.encode_batch_fast([texts[at] for at in missing], add_special_tokens=False)  # no GIL
        fresh = {at: np.array(encoding.ids, np.int32) for at, encoding in zip(missing, encoded, strict=True)}
        with self._lock:
            for at, ids in fresh.items():
                if at < len(ends):
                    self._keep((owner, texts[at]), ids)
        return [fresh[at] if ids is None else ids for at, ids in enumerate((*found, None))]

    def _known(self, key: tuple[Owner, str]) -> TokenArray | None:
        ids = self._pieces.get(key)
        if ids is not None:
            self._pieces.move_to_end(key)
        return ids

    def _keep(self, key: tuple[Owner, str], ids: TokenArray) -> None:
        if key in self._pieces or _bytes_of(key, ids) > self._bytes_max:
            return
        self._pieces[key] = ids
        self.held_bytes += _bytes_of(key, ids)
        while self.held_bytes > self._bytes_max:
            self.held_bytes -= _bytes_of(*self._pieces.popitem(last=False))


def _bytes_of(key: tuple[Owner, str], ids: TokenArray) -> int:
    (tenant, salt), text = key
    return _ENTRY_BYTES + 4 * (len(tenant) + len(salt) + len(text)) + ids.nbytes  # four bytes a character at most


def cuts_of(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Finds the added tokens in a text, as ``tokenizer`` does: the leftmost, and the longest of those. ``None``: the
    ids of a text might depend on what stands across such a token."""
    spec = json.loads(tokenizer.to_str())
    added = spec["added_tokens"]
    takes_more = any(
        token["normalized"] or token["lstrip"] or token["rstrip"] or token["single_word"] or not token["content"]
        for token in added
    )
    model = spec["model"]
    is_plain = model["type"] == "BPE" and not model.get("dropout") and spec["normalizer"] is None
    if not added or takes_more or not is_plain or tokenizer.encode_special_tokens:
        return None
    if not _cuts_alone(spec["pre_tokenizer"]):
        return None
    contents = sorted((token["content"] for token in added), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, contents)))


def _cuts_alone(step: dict[str, Any] | None) -> bool:
    """Whether this step treats each piece as if it were all of the text."""
    match step:
        case {"type": "Sequence", "pretokenizers": steps}:
            return bool(steps) and all(map(_cuts_alone, steps))
        case {"type": "ByteLevel", "add_prefix_space": False} | {"type": "Split" | "Digits"}:
            return True
    return False
