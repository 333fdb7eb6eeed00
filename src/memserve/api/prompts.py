"""From prompts and messages to token ids, without blocking the event loop (level 4)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer

from memserve.api.errors import bad_request, unsupported
from memserve.api.schema import ChatBody
from memserve.api.served import ServedModel
from memserve.types import TokenArray

Result = TypeVar("Result")

INLINE_CHARS_MAX = 1000
"""Tokenizing this much (0.3 ms) costs less than a trip to a thread and back."""

IDS_PER_CHAR = 10
"""Token ids are checked as quickly as one character is tokenized."""

PROMPTS_MAX = 2048
MESSAGES_MAX = 10_000

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MESSAGE_FIELDS = {"role", "content", "name", "refusal", "annotations", "audio", "tool_calls", "function_call"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for the engine. ``text`` is kept for ``echo``."""

    tokens: TokenArray
    text: str | None = None


class PromptEncoder:
    """Tokenizes for one model. Long work happens in threads: tokenizers releases the GIL."""

    def __init__(self, model: ServedModel, threads: int = 2) -> None:
        self._model = model
        self.tokenizer: Tokenizer = model.tokenizer.backend_tokenizer
        self.tokenizer.no_truncation()  # a tokenizer.json may ask for it, and prompts must never be cut in silence
        self.tokenizer.no_padding()
        self._vocab = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self._token_chars_max = self._longest_token()
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="memserve-tokenize")

    def close(self) -> None:
        """Stop the threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def decode(self, tokens: TokenArray) -> str:
        """The text of a prompt that came as token ids."""
        return self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)

    async def completion_prompts(self, prompt: Any, *, add_special_tokens: bool) -> list[Prompt]:
        """The prompts of a completion: a string, strings, token ids, or lists of token ids."""
        prompts = self._split(prompt)
        chars = sum(len(item) if isinstance(item, str) else len(item) // IDS_PER_CHAR for item in prompts)
        return await self._run(chars, lambda: [self._encode(item, add_special_tokens) for item in prompts])

    async def chat_prompt(self, body: ChatBody, messages: list[dict[str, str]]) -> Prompt:
        """Checked messages through the model's chat template, as the body wants it."""
        if body.continue_final_message and body.add_generation_prompt:
            raise bad_request("continue_final_message and add_generation_prompt exclude each other")
        chars = sum(len(message["content"]) for message in messages)
        return await self._run(chars, lambda: self._encode(self._render(messages, body), False))

    @property
    def has_chat_template(self) -> bool:
        """Whether the model was made for conversations."""
        return bool(getattr(self._model.tokenizer, "chat_template", None))

    async def messages_prompt(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> Prompt:
        """Checked messages through the chat template."""
        body = ChatBody(model=self._model.name, add_generation_prompt=add_generation_prompt)
        chars = sum(len(message["content"]) for message in messages)
        return await self._run(chars, lambda: self._encode(self._render(messages, body), False))

    def render_chat(self, messages: list[dict[str, str]]) -> Prompt:
        """The prompt of a plain conversation, for callers without an event loop. Raises :class:`ApiError`."""
        return self._encode(self._render(check_messages(messages), ChatBody(model=self._model.name)), False)

    async def _run(self, chars: int, work: Callable[[], Result]) -> Result:
        if chars <= INLINE_CHARS_MAX:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _split(self, prompt: Any) -> list[str | list[int]]:
        if isinstance(prompt, str) or _is_token_list(prompt):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise bad_request("'prompt' must be a string, a list of strings, token ids, or lists of ids", "prompt")
        if len(prompt) > PROMPTS_MAX:
            raise bad_request(f"{len(prompt)} prompts in one request; the limit is {PROMPTS_MAX}", "prompt")
        all_text = all(isinstance(item, str) for item in prompt)
        if not all_text and not all(_is_token_list(item) for item in prompt):
            raise bad_request("'prompt' mixes kinds, or holds something other than text and token ids", "prompt")
        return prompt

    def _encode(self, prompt: str | list[int], add_special_tokens: bool) -> Prompt:
        if isinstance(prompt, str):
            self._refuse_hopeless(prompt)
            ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens).ids
            encoded = Prompt(np.array(ids, dtype=np.int32), prompt)
        else:
            encoded = Prompt(self._checked(prompt))
        if not len(encoded.tokens):
            raise bad_request("The prompt is empty", "prompt")
        return encoded

    def _checked(self, prompt: list[int]) -> TokenArray:
        try:
            ids = np.array(prompt, dtype=np.int64)
        except OverflowError:
            ids = np.array([-1])  # larger than any vocabulary
        if ids.min() < 0 or ids.max() >= self._vocab:
            raise bad_request(f"The prompt has a token id outside of the vocabulary [0, {self._vocab})", "prompt")
        return ids.astype(np.int32)

    def _render(self, messages: list[dict[str, str]], body: ChatBody) -> str:
        final = bool(body.continue_final_message)
        start_answer = body.add_generation_prompt if body.add_generation_prompt is not None else not final
        try:
            text = self._model.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=start_answer,
                continue_final_message=final,
                **{**(body.chat_template_kwargs or {}), "chat_template": None},
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise bad_request(f"The chat template refuses these messages: {error}", "messages") from None
        return str(text)

    def _longest_token(self) -> int | None:
        """Characters in the longest token, or ``None`` where one token may stand for any length of text."""
        if self.tokenizer.normalizer is not None or "ByteLevel" not in repr(self.tokenizer.decoder):
            return None
        return max(len(token) for token in self.tokenizer.get_vocab(with_added_tokens=True))

    def _refuse_hopeless(self, text: str) -> None:
        """A text so long that no tokenization fits the context is not worth seconds of tokenizing."""
        if self._token_chars_max and len(text) > self._model.max_model_tokens * self._token_chars_max:
            raise context_exceeded(self._model.max_model_tokens, f"a prompt of {len(text)} characters")


def context_exceeded(limit_tokens: int, asked: str) -> Exception:
    """400: prompt and answer do not fit into the model's context."""
    message = f"This model's maximum context length is {limit_tokens} tokens. However, your request has {asked}."
    return bad_request(message, code="context_length_exceeded")


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def check_messages(messages: Any) -> list[dict[str, str]]:
    """``messages`` with plain string contents. Raises :class:`ApiError` 400 naming the message at fault."""
    if not isinstance(messages, list) or not messages:
        raise bad_request("'messages' must hold at least one message", "messages")
    if len(messages) > MESSAGES_MAX:
        raise bad_request(f"{len(messages)} messages in one request; the limit is {MESSAGES_MAX}", "messages")
    return [_check_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise bad_request(f"'{where}' must be an object with role and content", where)
    unknown = [key for key in message if key not in _MESSAGE_FIELDS and message[key] is not None]
    role = message.get("role")
    if role in ("tool", "function") or message.get("tool_calls") or message.get("function_call"):
        raise unsupported(where, "Tool calling")
    if message.get("audio"):
        raise unsupported(where, "Audio")
    if unknown:
        raise bad_request(f"Unknown field '{where}.{unknown[0]}'", f"{where}.{unknown[0]}", "unknown_field")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(f"'{where}.role' must be one of {', '.join(_ROLES)}", f"{where}.role")
    checked = {"role": _ROLES[role], "content": _content(message.get("content"), role, f"{where}.content")}
    if (name := message.get("name")) is not None:
        if not isinstance(name, str):
            raise bad_request(f"'{where}.name' must be a string", f"{where}.name")
        checked["name"] = name
    return checked


def _content(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list) or not content:
        raise bad_request(f"'{where}' must be a string or a list of text parts", where)
    return "".join(_part(part, f"{where}[{at}]") for at, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise bad_request(f"'{where}' must be an object like {{'type': 'text', 'text': ...}}", where)
    if part["type"] != "text":
        raise unsupported(where, f"Content of type {part['type']!r}")
    if not isinstance(part.get("text"), str):
        raise bad_request(f"'{where}.text' must be a string", f"{where}.text")
    text: str = part["text"]
    return text
