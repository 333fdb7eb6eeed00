"""From tokens to text, one sequence at a time: UTF-8-safe, with stop strings.

    tokens -> Detokenizer -> text that can no longer change -> StopFinder -> text that the client may see
                 |                                                 |
                 bytes of an unfinished character                  the start of what may become a stop string

Both stages hold something back; ``finish`` lets it go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from memserve._core import StopFinder, StopStrings
from memserve.base.types import FinishReason, TokenOutput

PENDING_TOKENS_MAX = 16
"""A character has at most four bytes, so more tokens than this without one valid character are junk: let them go."""

PENDING_TOKENS_KEPT = 4
"""Last tokens of the junk, which may still be the start of a character."""


@lru_cache(maxsize=8)
def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that never show as text, such as end-of-sequence marks."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


class Detokenizer:
    """Turns tokens into text that later tokens cannot change.

    ``DecodeStream`` does the work; this adds what it lacks: a flush at the end, a bound on what it buffers (a model
    that utters invalid bytes or special tokens for ever would make it quadratic), and a new start when it gives up.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = special_token_ids(tokenizer) if skip_special_tokens else frozenset()
        self._stream = DecodeStream(skip_special_tokens=False)
        self._context: list[int] = []  # the tokens of the last text given out
        self._pending: list[int] = []  # tokens since then

    def push_token(self, token: int) -> str:
        """Text that ``token`` completes, often ``""`` inside a character of several tokens."""
        if token in self._hidden:
            return ""
        self._pending.append(token)
        text = self._step_stream(token)
        if text is not None:
            self._context, self._pending = self._pending, []
            return text
        if len(self._pending) > PENDING_TOKENS_MAX:
            return self._drop_pending(keep=PENDING_TOKENS_KEPT)
        return ""

    def flush_text(self) -> str:
        """What is left; bytes of an unfinished character show as U+FFFD."""
        return self._drop_pending(keep=0) if self._pending else ""

    def _step_stream(self, token: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer, token)
        except Exception as error:  # tokenizers raises bare Exception: earlier text changed under a later token
            if "Invalid prefix" not in str(error):
                raise
            return self._drop_pending(keep=0)

    def _drop_pending(self, keep: int) -> str:
        going, staying = self._pending[: len(self._pending) - keep], self._pending[len(self._pending) - keep :]
        before = self._decode_tokens(self._context)
        text = self._decode_tokens(self._context + going)
        text = text[len(before) :] if text.startswith(before) else self._decode_tokens(going)
        self._context, self._pending = going, staying
        self._stream = DecodeStream(skip_special_tokens=False)
        for token in staying:
            self._stream.step(self._tokenizer, token)
        return text

    def _decode_tokens(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False) if tokens else ""


class Stops:
    """The stop strings of a request, shared by its sequences.

    A finder holds back the end of the text that may become a stop string. The stop string that ends
    first wins, and of several ending together the longest: the answer is the same for any way of cutting the text.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._automaton: StopStrings | None = None

    def new_finder(self) -> StopFinder | None:
        """For one sequence, with its first token. None: there are no stop strings."""
        if not self._strings:
            return None
        if self._automaton is None:  # at the first token: 20 bytes a character are not spent on requests that wait
            self._automaton = StopStrings(self._strings)
        return StopFinder(self._automaton)

    def string_at_start(self, text: str) -> str | None:
        """The stop string that ends first in a ``text`` that begins with it."""
        return min((string for string in self._strings if text.startswith(string)), key=len, default=None)


class TextDelta(msgspec.Struct, frozen=True):
    """News of one sequence as text."""

    text: str
    tokens_shown: int
    """How many more of the sequence's tokens have their first character in the text shown so far."""
    finish_reason: FinishReason | None = None
    stop_found: bool = False
    """A stop string was found here: the engine must be told to end the sequence."""


class TextStream:
    """The text of one sequence: feed it every :class:`TokenOutput`, show what it returns.

    ``tokens`` and ``offsets`` grow together: token ``i``'s first character is at ``offsets[i]`` of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Stops | None = None,
        stop_token_ids: Iterable[int] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = stops
        self._finder: StopFinder | None = None  # with the first token
        self._held_text = ""  # what the finder has and is not shown yet
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._decoded_chars = 0
        self._shown_chars = 0
        self._shown_tokens = 0
        self.tokens: list[int] = []
        self.offsets: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_string: str | None = None
        """That which ended the text."""

    def push_output(self, output: TokenOutput) -> TextDelta:
        """The text that ``output`` adds. After the end (for example a stop string found) later outputs add nothing."""
        if self.finish_reason is not None:
            return TextDelta("", 0)
        if self._stops is not None and self._finder is None:
            self._finder = self._stops.new_finder()
        text = ""
        for token in output.tokens:
            text += self._push_token(token, output)
            if self._is_stopped:
                break
        if self._is_stopped:
            self.finish_reason = FinishReason.STOP
            return self._make_delta(text, stop_found=output.finish_reason is None)
        if output.finish_reason is not None:
            rest = self._detokenizer.flush_text()
            text += self._show(rest) + ("" if self._finder is None else self._finder.finish())
            self.finish_reason = FinishReason.STOP if self._is_stopped else output.finish_reason
        return self._make_delta(text)

    @property
    def _is_stopped(self) -> bool:
        return self._finder is not None and self._finder.found

    def _push_token(self, token: int, output: TokenOutput) -> str:
        self.tokens.append(token)
        self.offsets.append(self._decoded_chars)
        if output.finish_reason is FinishReason.STOP and token in self._stop_token_ids:
            return ""  # a stop token ends the text and is no part of it
        text = self._detokenizer.push_token(token)
        self._decoded_chars += len(text)
        return self._show(text)

    def _show(self, text: str) -> str:
        """What of ``text``, of the last tokens, the client may see. No stop string may begin in the first tokens."""
        if self._finder is None or len(self.tokens) <= self._min_tokens:
            return text
        shown = self._finder.push(text)
        self._held_text = (self._held_text + text)[len(shown) :]
        if self._finder.found and self._stops is not None:
            self.stop_string, self._held_text = self._stops.string_at_start(self._held_text), ""
        return shown

    def _make_delta(self, text: str, *, stop_found: bool = False) -> TextDelta:
        self._shown_chars += len(text)
        shown = self._shown_tokens
        ended_whole = self.finish_reason is not None and not self._is_stopped
        while self._shown_tokens < len(self.tokens) and (
            ended_whole or self.offsets[self._shown_tokens] < self._shown_chars
        ):
            self._shown_tokens += 1
        return TextDelta(text, self._shown_tokens - shown, self.finish_reason, stop_found)
