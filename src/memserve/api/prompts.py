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

from memserve.api.errors import bad_request
from memserve.api.messages import Messages, check_messages, check_rendered, for_template, text_chars
from memserve.api.schema import ChatBody
from memserve.api.served import ServedModel
from memserve.errors import UserError
from memserve.types import TokenArray
from memserve.validation import token_array

Result = TypeVar("Result")

INLINE_CHARS_MAX = 1000
"""Tokenizing this much (0.3 ms) costs less than a trip to a thread and back."""

IDS_PER_CHAR = 10
"""Token ids are checked as quickly as one character is tokenized."""

PROMPTS_MAX = 2048


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
        self.vocab_size = model.vocab_size
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

    async def chat_prompt(self, body: ChatBody, messages: Messages) -> Prompt:
        """Checked messages through the model's chat template, as the body wants it."""
        if body.continue_final_message and body.add_generation_prompt:
            raise bad_request("continue_final_message and add_generation_prompt exclude each other")
        chars = text_chars(messages)
        return await self._run(chars, lambda: self._encode(self._render(messages, body), False))

    @property
    def has_chat_template(self) -> bool:
        """Whether the model was made for conversations."""
        return bool(getattr(self._model.tokenizer, "chat_template", None))

    async def messages_prompt(self, messages: Messages, *, add_generation_prompt: bool = True) -> Prompt:
        """Checked messages through the chat template."""
        body = ChatBody(model=self._model.name, add_generation_prompt=add_generation_prompt)
        chars = text_chars(messages)
        return await self._run(chars, lambda: self._encode(self._render(messages, body), False))

    def render_chat(self, messages: Messages) -> Prompt:
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
            return token_array(prompt, self.vocab_size)
        except UserError as error:
            raise bad_request(error.message, error.param) from None

    def _render(self, messages: Messages, body: ChatBody) -> str:
        final = bool(body.continue_final_message)
        start_answer = body.add_generation_prompt if body.add_generation_prompt is not None else not final
        tokenizer = self._model.tokenizer
        try:
            prepared, tools = for_template(messages, body, str(tokenizer.chat_template or ""))
            text = tokenizer.apply_chat_template(
                prepared,
                tools=tools,
                tokenize=False,
                add_generation_prompt=start_answer,
                continue_final_message=final,
                **{**(body.chat_template_kwargs or {}), "chat_template": None},
            )
        except (TemplateError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            raise bad_request(f"The chat template refuses these messages: {error}", "messages") from None
        check_rendered(prepared, str(text))
        return str(text)

    def _longest_token(self) -> int | None:
        """Characters in the longest token, or ``None`` where one token may stand for any length of text."""
        if self.tokenizer.normalizer is not None or "ByteLevel" not in repr(self.tokenizer.decoder):
            return None
        return max(len(token) for token in self.tokenizer.get_vocab(with_added_tokens=True))

    def _refuse_hopeless(self, text: str) -> None:
        """A text so long that no tokenization fits the context is not worth seconds of tokenizing."""
        if self._token_chars_max and len(text) > self._model.max_model_tokens * self._token_chars_max:
            raise context_exceeded(self._model, f"a prompt of {len(text)} characters")


def context_exceeded(model: ServedModel, asked: str) -> Exception:
    """400: prompt and answer do not fit into the context that is served."""
    note = f" (of this server: {model.context_note})" if model.context_note else ""
    limit = f"This model's maximum context length is {model.max_model_tokens} tokens{note}."
    message = f"{limit} However, your request has {asked}."
    return bad_request(message, code="context_length_exceeded")


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}
