"""What clients write is text: a control token in it (``<|im_end|>``) ends no turn.

    messages --hide--> template --> text with stand-ins --seal--> text of marks --> ids
                                                                  a tokenizer that knows control tokens
                                                                  by other names, which no client knows

Only texts with a control token in them go this way, so that all others cost a search. The ids are those of the same
tokenizer: cuts, merges and spaces are as they would be.

Control tokens are the tokenizer's special ones, and added tokens that the chat template writes (``<tool_response>``).
The latter remain what they are in texts of the system and of the assistant, whose marks they are.
"""

from __future__ import annotations

import json
import operator
import re
import secrets
import threading
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

from memserve.api.http.errors import bad_request

STEM_CHARS = 3
"""A text without the first characters of any control token has none: that is a quick look."""
ROLES = {
    "system", "user", "assistant", "tool", "developer", "function", "observation", "ipython", "environment", "model",
}  # fmt: skip
"""Templates may write a role between the marks of a control token. Others must not make one of those that end turns."""

_STAND_IN = f"text{secrets.token_hex(16)}x"
_HIDDEN = re.compile(_STAND_IN + "([0-9a-f]+)x")
_PRIVATE, _PRIVATE_COUNT = 0xE000, 6000
_NAME = "".join(chr(_PRIVATE + secrets.randbelow(_PRIVATE_COUNT)) for _ in range(9))
_OWN_MARKS = ("system", "assistant")
OF_CONTENT = "of_document"
"""Set in a message that is a document's text, whatever its role is."""


class ControlTokens:
    """The control tokens of one model, and the tokenizer for texts that have some written in them. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer, self._template = tokenizer, template
        added = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]
        special = [token for token in added if token.special]
        marks = [token for token in added if not token.special and token.content in template]
        self._contents = [token.content for token in (*special, *marks)]
        self._any_added = _pattern(token.content for token in added)
        self._special, self._all = _pattern(token.content for token in special), _pattern(self._contents)
        self._stems = {content[:STEM_CHARS] for content in self._contents}
        self._heads = {content[:n] for content in self._contents for n in range(1, len(content))}
        self._tails = {content[n:] for content in self._contents for n in range(1, len(content))}
        self._piece_chars = max(map(len, self._contents), default=1) - 1
        self._normalized = self._normalized_pattern(token.content for token in (*special, *marks) if token.normalized)
        self._names = {content: _name_of(index) for index, content in enumerate(self._contents)}
        self._lock = threading.Lock()
        self._guarded: Tokenizer | None = None

    def may_be_in(self, data: bytes) -> bool:
        """Whether ``data`` may have a control token written in it: a quick look."""
        return any(stem.encode() in data for stem in self._stems)

    def are_in(self, text: str) -> bool:
        """Whether ``text`` has a control token written in it."""
        return self._hits(text, self._all) or self._is_hit_normalized(text)

    def hide_in_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """``messages`` with stand-ins for control tokens; the same list where there are none. Raises :class:`ApiError`
        400 for a role that would be a part of one."""
        for role in {message["role"] for message in messages} - ROLES:
            if any(role in content for content in self._contents) and f"'{role}'" not in self._template:
                raise bad_request(f"the role {role[:64]!r} is a part of a control token of this model", "messages")
        fresh = [self._hide(message, self._pattern_for(message)) for message in messages]
        if self._may_join(messages):
            fresh = [self._hide_pieces(message) for message in fresh]
        return messages if all(map(operator.is_, fresh, messages)) else fresh

    def hide_in(self, value: Any) -> Any:
        """``value``, of builtin types, with stand-ins in its texts."""
        return self._hide(value, self._all)

    def has_hidden(self, text: str) -> bool:
        """Whether ``text`` has stand-ins."""
        return _STAND_IN in text

    def restore_text(self, text: str) -> str:
        """``text`` with what the stand-ins stand for."""
        return _HIDDEN.sub(_hidden_text, text) if _STAND_IN in text else text

    def seal_text(self, text: str) -> str:
        """``text`` as :meth:`guarded_tokenizer` reads it: control tokens by their other names, then stand-ins
        restored."""
        names = self._names
        sealed = self._any_added.sub(lambda match: names.get(match.group(), match.group()), text)
        return self.restore_text(sealed)

    def guarded_tokenizer(self) -> Tokenizer:
        """The tokenizer that knows control tokens by their other names alone; made when it is first needed. Raises
        :class:`ApiError` 400 where this tokenizer cannot be changed so."""
        with self._lock:
            if self._guarded is None:
                self._guarded = self._renamed_tokenizer()
        return self._guarded

    # -- inside

    def _pattern_for(self, message: dict[str, Any]) -> re.Pattern[str]:
        return self._special if message["role"] in _OWN_MARKS and not message.get(OF_CONTENT) else self._all

    def _hits(self, text: str, pattern: re.Pattern[str]) -> bool:
        return any(stem in text for stem in self._stems) and pattern.search(text) is not None

    def _hide(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            if self._hits(value, pattern):
                return pattern.sub(lambda match: _stand_in(match.group()), value)
            return _with_first_hidden(value) if self._is_hit_normalized(value) else value
        if isinstance(value, dict):
            fresh = {self._hide(name, pattern): self._hide(entry, pattern) for name, entry in value.items()}
            return (
                value
                if all(map(operator.is_, fresh.values(), value.values())) and fresh.keys() == value.keys()
                else fresh
            )
        if isinstance(value, list):
            entries = [self._hide(entry, pattern) for entry in value]
            return value if all(map(operator.is_, entries, value)) else entries
        return value

    def _may_join(self, messages: list[dict[str, Any]]) -> bool:
        """Whether a template that writes two of the texts in a row would make a control token of their ends."""
        texts = [text for message in messages for text in _texts_of(message)]
        return any(self._head_at_end(text) for text in texts) and any(self._tail_at_start(text) for text in texts)

    def _head_at_end(self, text: str) -> str:
        end = text.rstrip()[-self._piece_chars :]
        return next((end[-n:] for n in range(len(end), 0, -1) if end[-n:] in self._heads), "")

    def _tail_at_start(self, text: str) -> str:
        start = text.lstrip()[: self._piece_chars]
        return next((start[:n] for n in range(len(start), 0, -1) if start[:n] in self._tails), "")

    def _hide_pieces(self, value: Any) -> Any:
        if isinstance(value, str):
            if tail := self._tail_at_start(value):
                value = value.replace(tail, _stand_in(tail), 1)
            if head := self._head_at_end(value):
                begin = value.rstrip().rindex(head)
                value = value[:begin] + _stand_in(head) + value[begin + len(head) :]
            return value
        if isinstance(value, dict):
            return {name: entry if name == "role" else self._hide_pieces(entry) for name, entry in value.items()}
        return [self._hide_pieces(entry) for entry in value] if isinstance(value, list) else value

    def _normalized_pattern(self, contents: Iterable[str]) -> re.Pattern[str] | None:
        """Finds tokens that a tokenizer looks for in normalized text; ``None``: it looks for none there."""
        normalizer = self._tokenizer.normalizer
        normalized = [normalizer.normalize_str(content) for content in contents] if normalizer is not None else []
        return _pattern(normalized) if normalized else None

    def _is_hit_normalized(self, text: str) -> bool:
        if self._normalized is None:
            return False
        return self._normalized.search(self._tokenizer.normalizer.normalize_str(text)) is not None

    def _renamed_tokenizer(self) -> Tokenizer:
        spec = json.loads(self._tokenizer.to_str())
        for token in spec["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        _rename_in_model(spec["model"], self._names)
        renamed = Tokenizer.from_str(json.dumps(spec))
        unknown = spec["model"].get("unk_token")  # what any text may become
        for content, name in self._names.items():
            token = self._tokenizer.token_to_id(content)
            ids = renamed.encode(content, add_special_tokens=False).ids
            if renamed.token_to_id(name) != token or (token in ids and name != unknown):
                message = f"a text has a control token in it, such as {content!r}, and this tokenizer cannot read it as"
                raise bad_request(f"{message} text: leave it out, or start the server with --trust-content-tokens")
        return renamed


def _rename_in_model(model: dict[str, Any], names: dict[str, str]) -> None:
    """A vocabulary may have the tokens as well, and merges that lead to them: then text could still become one."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): token for piece, token in vocab.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), *score] for piece, *score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint([*pair, "".join(pair)])]


def _pattern(contents: Iterable[str]) -> re.Pattern[str]:
    """Finds the leftmost, and the longest of those, as tokenizers do."""
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")


def _name_of(index: int) -> str:
    return _NAME + chr(_PRIVATE + index // _PRIVATE_COUNT) + chr(_PRIVATE + index % _PRIVATE_COUNT)


def _stand_in(text: str) -> str:
    return f"{_STAND_IN}{text.encode('utf-8', 'surrogatepass').hex()}x"


def _hidden_text(match: re.Match[str]) -> str:
    return bytes.fromhex(match.group(1)).decode("utf-8", "surrogatepass")


def _with_first_hidden(text: str) -> str:
    """One visible character hidden: the text is then tokenized with care."""
    begin = len(text) - len(text.lstrip())
    return text[:begin] + _stand_in(text[begin : begin + 1]) + text[begin + 1 :] if begin < len(text) else text


def _texts_of(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _texts_of(entry)
