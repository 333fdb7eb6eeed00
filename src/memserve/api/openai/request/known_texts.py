"""Token ids of texts that clients send again: a chat's next turn, or another question about the same text.

A tokenizer cuts a text at its added tokens (``<|im_end|>``) before it does anything else. Where nothing else looks
across such a cut, the ids of a text are those of its pieces in a row, each up to an added token and with it; a piece
that was tokenized before need not be tokenized again. A long piece is cut at *joints* too, where the tokenizer ends a
word whatever follows: between a letter and a blank. Cuts depend on what is before them alone, so texts that begin alike
are cut alike. What lies behind the last cut is not kept: it is an answer's beginning.

Each owner (a tenant, and the salt of its request) has pieces of its own, so the time that tokenizing takes tells no
client what another one has sent.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from memserve.base.types import TokenArray
from memserve.base.units import MIB

BYTES_MAX = 32 * MIB
"""Of all pieces with their ids: about 1.7 million tokens of English text."""
PIECE_CHARS = 256
"""A piece goes on for so long before it is cut at a joint."""
_ENTRY_BYTES = 400
"""Of a piece, beside its text and its ids."""

NO_FRAME = np.empty(0, np.int32), np.empty(0, np.int32)
"""Of a text without special tokens around it: see :func:`frame_of`."""

Owner = tuple[str, str]
"""Tenant and salt."""


@dataclass(frozen=True, slots=True)
class TextPieces:
    """A text cut into pieces, and what is known of them."""

    owner: Owner
    texts: list[str]
    ids: list[TokenArray | None]
    """Of each piece; None: not known."""

    @property
    def unknown_chars(self) -> int:
        """Characters that are to be tokenized."""
        return sum(len(text) for text, ids in zip(self.texts, self.ids, strict=True) if ids is None)


@dataclass(slots=True)
class _Piece:
    ids: TokenArray
    was_used: bool = False


class KnownTexts:
    """Tokenizes texts piece by piece, and keeps pieces that are used. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, bytes_max: int = BYTES_MAX) -> None:
        self.tokenizer, self._bytes_max = tokenizer, bytes_max
        self.token_bytes_max = longest_token_bytes(tokenizer)
        self.frame = frame_of(tokenizer)
        self._cuts, self._joints = cuts_of(tokenizer), joints_of(tokenizer)
        self._pieces: dict[tuple[Owner, str], _Piece] = {}  # those that were kept, or saved from being dropped, first
        self._lock = threading.Lock()
        self.cached_bytes = 0

    def tokenize_text(self, text: str, owner: Owner) -> list[TokenArray] | None:
        """The ids of ``text`` without those that a tokenizer puts around it, as int32 arrays to be joined. ``None``:
        the text has no piece that could be known, or the tokenizer looks across pieces."""
        pieces = self.find_pieces(text, owner)
        return None if pieces is None else self.complete_pieces(pieces)

    def find_pieces(self, text: str, owner: Owner) -> TextPieces | None:
        """What is known of ``text``, for :meth:`complete_pieces`; ``None`` as of :meth:`tokenize_text`. Quick: nothing
        is tokenized."""
        ends = self._find_ends(text)
        if not ends:
            return None
        texts, ids, first = list[str](), list[TokenArray | None](), 0
        with self._lock:
            lookup = self._pieces.get
            for end in ends:
                texts.append(piece := text[first:end])
                match, first = lookup((owner, piece)), end
                if match is None:
                    ids.append(None)
                else:
                    match.was_used = True
                    ids.append(match.ids)
        return TextPieces(owner, [*texts, text[first:]], [*ids, None])

    def complete_pieces(self, pieces: TextPieces) -> list[TokenArray]:
        """The ids of all pieces, as arrays to be joined; those that were not known are from now on, but the last."""
        owner, texts, ids = pieces.owner, pieces.texts, list(pieces.ids)
        misses = [index for index, piece_ids in enumerate(ids) if piece_ids is None]  # the last piece is one of them
        fresh_texts = [texts[index] for index in misses]
        encoded = self.tokenizer.encode_batch_fast(fresh_texts, add_special_tokens=False)  # without the GIL
        fresh = [np.array(encoding.ids, np.int32) for encoding in encoded]
        for index, piece_ids in zip(misses, fresh, strict=True):
            ids[index] = piece_ids
        if len(misses) > 1:
            with self._lock:
                for index, piece_ids in zip(misses[:-1], fresh, strict=False):
                    self._store_piece((owner, texts[index]), piece_ids)
        return [piece_ids for piece_ids in ids if piece_ids is not None]

    def _find_ends(self, text: str) -> list[int]:
        """Of all pieces but the last."""
        if self._cuts is None:
            return []
        marks = [match.end() for match in self._cuts.finditer(text)]
        if self._joints is None or len(text) <= PIECE_CHARS:
            return marks
        ends, first = list[int](), 0
        for end in (*marks, len(text)):
            while end - first > PIECE_CHARS and (joint := self._joints.search(text, first + PIECE_CHARS, end)):
                first = joint.start()
                ends.append(first)
            first = end
            ends.append(end)
        return ends[:-1]

    def _store_piece(self, key: tuple[Owner, str], ids: TokenArray) -> None:
        if key in self._pieces or _bytes_of(key, ids) > self._bytes_max:
            return
        self._pieces[key] = _Piece(ids)
        self.cached_bytes += _bytes_of(key, ids)
        while self.cached_bytes > self._bytes_max:
            oldest = next(iter(self._pieces))
            entry = self._pieces.pop(oldest)
            if entry.was_used:  # since it was kept, or looked at here: it is dropped when it was not used again
                entry.was_used = False
                self._pieces[oldest] = entry
            else:
                self.cached_bytes -= _bytes_of(oldest, entry.ids)


def _bytes_of(key: tuple[Owner, str], ids: TokenArray) -> int:
    (tenant, salt), text = key
    text_bytes = len(text) * (1 if text.isascii() else 4)  # four bytes a character at most
    return _ENTRY_BYTES + 4 * (len(tenant) + len(salt)) + text_bytes + ids.nbytes


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


# -- joints

_JOINT = re.compile(r"(?<=[a-z\u4e00-\u9fff])(?=[ \n\uff0c\u3002])")
"""A letter before it, a blank, an end of a line or a mark of Chinese behind it."""
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_OF_LETTERS = {
    r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    *(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{ending}"
        for ending in ("", f"(?i:{_CONTRACTIONS})?")
    ),
}  # fmt: skip
"""Alternatives of which one matches any letter that may be before a joint, and none a letter with something else behind
it, except for what follows an apostrophe."""
_OF_OTHERS = {
    *_CONTRACTIONS.split("|"), f"(?i:{_CONTRACTIONS})",
    r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r" ?\p{N}+",
    r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r" ?[\p{P}\p{S}]+[\r\n]*",
    r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+", r"\s",
    *(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{ending}"
        for ending in ("", f"(?i:{_CONTRACTIONS})?")
    ),
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
}  # fmt: skip
"""Alternatives that match nothing across a joint."""


def joints_of(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Finds places at which ``tokenizer`` ends a word, and where what is before and behind is tokenized as if it were
    all of the text. ``None``: it is not known to have such."""
    spec = json.loads(tokenizer.to_str())
    crosses = re.compile(r"[a-z\u4e00-\u9fff][ \n\uff0c\u3002]")
    if any(crosses.search(token["content"]) for token in spec["added_tokens"]):
        return None
    step = spec["pre_tokenizer"] or {}
    steps = step.get("pretokenizers", [step])
    ends_words = [_ends_words(step) for step in steps]
    return _JOINT if None not in ends_words and any(ends_words) else None


def _ends_words(step: dict[str, Any]) -> bool | None:
    """Whether this step cuts at each joint. None: it may look across one."""
    match step:
        case {"type": "ByteLevel", "use_regex": uses_regex}:
            return bool(uses_regex)
        case {"type": "Digits"}:
            return False
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} | {
            "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Removed", "invert": True,
        }:  # fmt: skip
            branches = set(_alternatives(pattern))
            return bool(branches & _OF_LETTERS) if branches <= _OF_LETTERS | _OF_OTHERS else None
    return None


def _alternatives(pattern: str) -> list[str]:
    """The alternatives of a regular expression at its top."""
    parts, begin, depth, in_class, escaped = list[str](), 0, 0, False, False
    for index, char in enumerate(pattern):
        if escaped or char == "\\":
            escaped = not escaped
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and not depth:
            parts.append(pattern[begin:index])
            begin = index + 1
    return [*parts, pattern[begin:]]


# -- what stands around a text, and how long its tokens may be


def frame_of(tokenizer: Tokenizer) -> tuple[TokenArray, TokenArray] | None:
    """The ids that ``tokenizer`` puts before and behind a text with special tokens, whatever the text is. ``None``:
    they may depend on it."""
    step = json.loads(tokenizer.to_str())["post_processor"]
    if not _frames_alone(step):
        return None
    plain, framed = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    for begin in range(len(framed) - len(plain) + 1):
        if framed[begin : begin + len(plain)] == plain:
            before, behind = framed[:begin], framed[begin + len(plain) :]
            return np.array(before, np.int32), np.array(behind, np.int32)
    return None


def _frames_alone(step: dict[str, Any] | None) -> bool:
    match step:
        case None | {"type": "ByteLevel"}:
            return True
        case {"type": "Sequence", "processors": steps}:
            return all(map(_frames_alone, steps))
        case {"type": "TemplateProcessing", "single": parts}:
            return sum("Sequence" in part for part in parts) == 1
    return False


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
