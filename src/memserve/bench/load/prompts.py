"""The request body of each turn of a session: the history with this server's answers. And the meter that
counts tokens with the served model's tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memserve.errors import check
from memserve.workloads.tokens import TokenizerMeter, tokens_of
from memserve.workloads.words import Blocks, Chat, History, Session, Text, Turn

CHAT_PATH, COMPLETION_PATH = "chat/completions", "completions"
VOCAB_SIZE_DEFAULT = 32_000


@dataclass(frozen=True, slots=True)
class Manner:
    """Options of all request bodies of a run."""

    model: str
    vocab_size: int = VOCAB_SIZE_DEFAULT
    """Prompts that are known only by their length use ids below it."""
    ignore_eos: bool = False
    """Every answer runs to its full length, so that all settings do equal work."""
    name_sessions: bool = True
    """Send ``prompt_cache_key``, OpenAI's name for requests that share a prefix."""
    salt: str = ""
    """Sent as ``cache_salt``, if not empty: requests with other salts share no cache with these (memserve, vLLM and
    SGLang know the field), and no session by name. Letters, digits and dashes: vLLM accepts no others."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of every body."""


class Dialogue:
    """One session with the answers of this server."""

    def __init__(self, session: Session, manner: Manner) -> None:
        self._session, self._manner = session, manner
        self._messages: list[dict[str, str]] = []
        self._text = ""

    def request(self, number: int) -> tuple[str, dict[str, Any]]:
        """Path and body of turn ``number``; turns are asked for in order, each once."""
        turn, manner = self._session.turns[number], self._manner
        path, asked = self._asked(turn)
        body: dict[str, Any] = {"model": manner.model, **asked, "max_tokens": turn.output_tokens_max}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        if turn.stop:
            body["stop"] = list(turn.stop)
        if manner.ignore_eos or isinstance(turn.says, Blocks):
            body["ignore_eos"] = True
        if manner.name_sessions:
            body["prompt_cache_key"] = f"{manner.salt}{self._session.session_id}"
        if manner.salt:
            body["cache_salt"] = manner.salt
        return path, body | manner.extra

    def _asked(self, turn: Turn) -> tuple[str, dict[str, Any]]:
        closed = self._session.history is History.CLOSED
        match turn.says:
            case Chat(messages):
                said = [{"role": message.role, "content": message.content} for message in messages]
                self._messages = [*self._messages, *said] if closed else said
                return CHAT_PATH, {"messages": self._messages}
            case Text(text):
                self._text = self._text + text if closed else text
                return COMPLETION_PATH, {"prompt": self._text}
            case Blocks() as blocks:
                check(not closed or len(self._session.turns) == 1, "prompts known only by length are given whole")
                return COMPLETION_PATH, {"prompt": tokens_of(blocks, vocab_size=self._manner.vocab_size).tolist()}

    def answered(self, text: str) -> None:
        """Remember the answer to the last request."""
        self._messages = [*self._messages, {"role": "assistant", "content": text}]
        self._text += text


TOKENIZER_FILE = "tokenizer.json"


def weighing(model: str | None) -> tuple[TokenizerMeter | None, int]:
    """The meter of ``model`` and the size of its vocabulary. No model: no meter, and the default size.

    ``model``: a folder, a .gguf file, a hub id or the bundled model's name. Loads the tokenizer, not the weights.
    Raises :class:`UserError` if there is none.
    """
    if model is None:
        return None, VOCAB_SIZE_DEFAULT
    from memserve.model.loading.sources import resolve_source

    folder = resolve_source(model, "auto")
    file = folder.path / TOKENIZER_FILE
    if file.is_file():  # counts as transformers does, without its import of seconds
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
    """A meter that counts tokens as ``model`` does. Raises as :func:`weighing` does."""
    meter, _ = weighing(model)
    assert meter is not None
    return meter
