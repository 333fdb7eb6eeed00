"""From prompts and messages to token ids. Long texts are processed in threads beside the event loop.

How long a text may be that becomes tokens: bounds from before a tokenizer takes memory for each of them.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import structs
from tokenizers import Encoding, Tokenizer

from memserve.api.http.errors import bad_request
from memserve.api.openai.interfaces import ServedModel
from memserve.api.openai.request.control_tokens import ControlTokens
from memserve.api.openai.request.known_texts import NO_FRAME, PIECE_CHARS, KnownTexts, Owner, TextPieces
from memserve.api.openai.request.messages import Messages, check_messages, check_rendered, for_template
from memserve.api.openai.request.schema import ChatBody
from memserve.base.errors import UserError
from memserve.base.types import TokenArray
from memserve.base.validation import token_array

TEXT_BYTES_MAX = 1 << 20


def text_bytes_max(model: ServedModel) -> int:
    """Of a text that is tokenized without a look at how many tokens it has: a token may be one byte."""
    return max(TEXT_BYTES_MAX, 8 * model.max_model_tokens)


Result = TypeVar("Result")

SHORT_PROMPT_CHARS = 2048
"""Up to this length ``encode`` is used, which holds the GIL and needs no thread of the library."""

TEMPLATE_CALLS_MAX = 2_000_000
"""Function calls of a chat template: about a second. Common templates make 300,000 for 10,000 messages."""

PROMPTS_MAX = 2048
ENDING_CHARS = 32
LOOKUP_CHARS_MAX = 1 << 16
"""Of a text whose pieces are looked up in the event loop: that takes 0.1 ms."""


class Prompt(msgspec.Struct, frozen=True):
    """One prompt, ready for the engine. ``text`` is kept for ``echo``."""

    tokens: TokenArray
    text: str | None = None
    ending: str = ""
    """Of a chat: the last characters of the prompt, which may begin the answer's thoughts."""


class PromptEncoder:
    """Tokenizes clients' texts for one model; tenants take turns."""

    def __init__(self, model: ServedModel, *, trusts_content: bool = False, tokens_max: int = 0) -> None:
        """``trusts_content``: control tokens in what clients write are control tokens. ``tokens_max``: of a text that
        is read although the context is shorter."""
        self._model, self._tokens_max = model, tokens_max
        self.tokenizer: Tokenizer = model.tokenizer.backend_tokenizer
        self.tokenizer.no_truncation()  # a tokenizer.json may ask for it, and prompts must never be cut silently
        self.tokenizer.no_padding()
        self.vocab_size = model.vocab_size
        self._known_texts = KnownTexts(self.tokenizer)
        template = str(getattr(model.tokenizer, "chat_template", None) or "")
        self._control_tokens = None if trusts_content else ControlTokens(self.tokenizer, template)
        self._guarded_texts: KnownTexts | None = None
        self.workers = TextWorkers()
        # One text gains nothing from the library's own threads, and must not wait for them behind another one.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def close(self) -> None:
        """Stop the threads."""
        self.workers.close()

    @property
    def text_tokens_max(self) -> int:
        """Of one text."""
        return max(self._model.max_model_tokens, self._tokens_max)

    async def run_work(self, tenant: str, text_bytes: int, data: bytes, work: Callable[[], Result]) -> Result:
        """As :meth:`TextWorkers.run_work`, for prompts of a body ``data``. The first one with a control token in its
        texts makes a tokenizer, which is never done in the event loop."""
        control = self._control_tokens
        if control is not None and self._guarded_texts is None and control.may_be_in(data):
            text_bytes = max(text_bytes, SHORT_BYTES_MAX + 1)
        return await self.workers.run_work(tenant, text_bytes, work)

    def decode_tokens(self, tokens: TokenArray) -> str:
        """The text of a prompt that came as token ids."""
        return self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)

    def find_pieces(self, prompt: Any, owner: Owner) -> TextPieces | None:
        """What is known of a completion's prompt, for :meth:`completion_prompts`. ``None``: nothing can be, or to look
        would hold up the event loop."""
        is_short = isinstance(prompt, str) and PIECE_CHARS < len(prompt) <= LOOKUP_CHARS_MAX
        return self._known_texts.find_pieces(prompt, owner) if is_short and self._known_texts.frame else None

    def completion_prompts(
        self, prompt: Any, *, add_special_tokens: bool, echo: bool, is_cut: bool = False, owner: Owner | None = None,
        pieces: TextPieces | None = None,
    ) -> list[Prompt]:  # fmt: skip
        """The prompts of a completion: a string, strings, token ids, or lists of token ids; with texts for ``echo``.
        ``is_cut``: they will be cut, and may be longer than the context. ``owner``: whose earlier texts may save time;
        ``pieces``: what was found of them in the only prompt."""
        return [
            self._completion_prompt(item, add_special_tokens, echo, is_cut, owner, pieces)
            for item in self._split_prompts(prompt)
        ]

    def _completion_prompt(
        self, item: str | list[int] | TokenArray, add_special_tokens: bool, echo: bool, is_cut: bool,
        owner: Owner | None, pieces: TextPieces | None,
    ) -> Prompt:  # fmt: skip
        prompt = self._encode(item, add_special_tokens, is_cut, owner, pieces=pieces)
        if not echo:
            return Prompt(prompt.tokens)
        return prompt if prompt.text is not None else Prompt(prompt.tokens, self.decode_tokens(prompt.tokens))

    def chat_prompt(self, body: ChatBody, messages: Messages, tenant: str = "") -> Prompt:
        """Checked messages of ``tenant`` through the model's chat template, with the options of ``body``."""
        echoed = messages[-1]["content"] if body.echo and messages[-1]["role"] == "assistant" else None
        is_cut = body.truncate_prompt_tokens is not None
        text = self._render_template(messages, body)
        tokens = self._encode_rendered(text, is_cut, (tenant, body.cache_salt or "")).tokens
        return Prompt(tokens, echoed, text[-ENDING_CHARS:])

    def chat_text(self, body: ChatBody, messages: Messages) -> str:
        """Checked messages through the model's chat template, for :meth:`token_ids`."""
        return self._render_template(messages, body)

    def prefix_lengths(
        self, body: ChatBody, marked_body: ChatBody, mark: re.Pattern[str], prompt: Prompt, tenant: str
    ) -> dict[str, int]:
        """How many tokens of ``prompt``, of ``body``, lie before each mark of the same chat with marks in its texts, by
        the mark's group 1. Empty where the template shows marks as something else."""
        pieces = mark.split(self._render_template(check_messages(marked_body.messages), marked_body))
        text = self._render_template(check_messages(body.messages), body)
        if "".join(pieces[::2]) != text:
            return {}
        lengths, chars = {}, 0
        for piece, name in zip(pieces[:-1:2], pieces[1::2], strict=True):
            chars += len(piece)
            if chars:
                tokens = self._encode_rendered(text[:chars], True, (tenant, body.cache_salt or "")).tokens
                lengths[name] = common_tokens(tokens, prompt.tokens)
        return lengths

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can answer chats."""
        return bool(getattr(self._model.tokenizer, "chat_template", None))

    def messages_prompt(self, messages: Messages, *, add_generation_prompt: bool = True) -> Prompt:
        """Checked messages through the chat template."""
        body = ChatBody(model=self._model.name, add_generation_prompt=add_generation_prompt)
        return self._encode_rendered(self._render_template(messages, body))

    def render_chat(self, messages: Messages) -> Prompt:
        """The prompt of a plain conversation, for callers without an event loop. Raises :class:`ApiError`."""
        return self._encode_rendered(self._render_template(check_messages(messages), ChatBody(model=self._model.name)))

    def document_prompt(self, text: str) -> Prompt:
        """A text that completions begin with."""
        control = self._control_tokens
        text_cache = self._known_texts if control is None or not control.are_in(text) else self._guarded()
        return self._encode(text, True, text_cache=text_cache)

    def _split_prompts(self, prompt: Any) -> list[str | list[int] | TokenArray]:
        if isinstance(prompt, str) or is_token_list(prompt):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise bad_request("'prompt' must be a string, a list of strings, token ids, or lists of ids", "prompt")
        if len(prompt) > PROMPTS_MAX:
            raise bad_request(f"{len(prompt)} prompts in one request; the limit is {PROMPTS_MAX}", "prompt")
        all_text = all(isinstance(item, str) for item in prompt)
        if not all_text and not all(is_token_list(item) for item in prompt):
            raise bad_request("'prompt' must be either all texts or all lists of token ids", "prompt")
        return prompt

    def token_ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """However many they are. Raises :class:`ApiError` 400 for a text of which no part could be a prompt."""
        text, text_cache = self._sealed(text)
        return list(self._encode_text(text, add_special_tokens, text_cache).ids)

    def hide_control_tokens(self, text: str) -> str:
        """A client's ``text`` as it may stand in a template: control tokens in it are text to :meth:`token_ids`."""
        return text if self._control_tokens is None else str(self._control_tokens.hide_in(text))

    def _encode_rendered(self, text: str, is_cut: bool = False, owner: Owner | None = None) -> Prompt:
        """A text that :meth:`_render_template` made."""
        sealed, text_cache = self._sealed(text)
        prompt = self._encode(sealed, False, is_cut, owner, text_cache)
        if text_cache is self._known_texts or self._control_tokens is None:
            return prompt
        return structs.replace(prompt, text=self._control_tokens.restore_text(text))

    def _sealed(self, text: str) -> tuple[str, KnownTexts]:
        """``text`` of the chat template, and what tokenizes it: with care where control tokens are hidden in it."""
        control = self._control_tokens
        if control is None or not control.has_hidden(text):
            return text, self._known_texts
        return control.seal_text(text), self._guarded()

    def _guarded(self) -> KnownTexts:
        assert self._control_tokens is not None
        if self._guarded_texts is None:
            self._guarded_texts = KnownTexts(self._control_tokens.guarded_tokenizer())
        return self._guarded_texts

    def _encode(
        self,
        prompt: str | list[int] | TokenArray,
        add_special_tokens: bool,
        is_cut: bool = False,
        owner: Owner | None = None,
        text_cache: KnownTexts | None = None,
        pieces: TextPieces | None = None,
    ) -> Prompt:
        """``owner``: whose earlier texts may save time. ``text_cache``: those, with their tokenizer; ``None``: of texts
        that need no care. ``pieces``: what was found there; ``None``: nothing was looked for."""
        text_cache = text_cache or self._known_texts
        if isinstance(prompt, str):
            tokens = None
            if owner is not None and len(prompt) <= text_bytes_max(self._model):
                tokens = self._encode_known(prompt, add_special_tokens, is_cut, owner, text_cache, pieces)
            if tokens is None:
                tokens = self._tokenize_text(prompt, add_special_tokens, is_cut, text_cache)
            encoded = Prompt(tokens, prompt)
        else:
            if not is_cut:
                self._refuse_more_than_fit(len(prompt))
            encoded = Prompt(self._checked_tokens(prompt))
        if not len(encoded.tokens):
            raise bad_request("The prompt is empty", "prompt")
        return encoded

    def _encode_known(
        self, text: str, add_special_tokens: bool, is_cut: bool, owner: Owner, text_cache: KnownTexts,
        pieces: TextPieces | None,
    ) -> TokenArray | None:  # fmt: skip
        """As :meth:`_tokenize_text`, by pieces. None: nothing could be known."""
        self._refuse_unservable(text, text_cache)
        frame = text_cache.frame if add_special_tokens else NO_FRAME
        pieces = pieces or (text_cache.find_pieces(text, owner) if frame is not None else None)
        if pieces is None or frame is None:
            return None
        tokens = np.concatenate([frame[0], *text_cache.complete_pieces(pieces), frame[1]])
        if not is_cut:
            self._refuse_more_than_fit(len(tokens))
        return tokens

    def _tokenize_text(self, text: str, add_special_tokens: bool, is_cut: bool, text_cache: KnownTexts) -> TokenArray:
        encoding = self._encode_text(text, add_special_tokens, text_cache)
        if not is_cut and len(text) > SHORT_PROMPT_CHARS:
            self._refuse_more_than_fit(len(encoding))  # before each id becomes a Python object
        return np.array(encoding.ids, dtype=np.int32)

    def _encode_text(self, text: str, add_special_tokens: bool, text_cache: KnownTexts) -> Encoding:
        self._refuse_unservable(text, text_cache)
        if len(text) > text_bytes_max(self._model):
            self._refuse_many_tokens(text, text_cache)
        if len(text) <= SHORT_PROMPT_CHARS:
            return text_cache.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        (encoding,) = text_cache.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)  # no GIL
        return encoding

    def _checked_tokens(self, prompt: list[int] | TokenArray) -> TokenArray:
        try:
            return token_array(prompt, self.vocab_size)
        except UserError as error:
            raise bad_request(error.message, error.param) from None

    def _render_template(self, messages: Messages, body: ChatBody) -> str:
        if body.continue_final_message and body.add_generation_prompt:
            raise bad_request("continue_final_message and add_generation_prompt exclude each other")
        final = bool(body.continue_final_message)
        start_answer = body.add_generation_prompt if body.add_generation_prompt is not None else not final
        tokenizer = self._model.tokenizer
        variables = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
        if self._control_tokens is not None:
            messages, body = self._without_control_tokens(messages, body, self._control_tokens)
        prepared, tools = for_template(messages, body, str(tokenizer.chat_template or ""))
        try:
            text = calls_bounded(
                TEMPLATE_CALLS_MAX,
                lambda: tokenizer.apply_chat_template(
                    prepared,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=start_answer,
                    continue_final_message=final,
                    **{**variables, **(body.chat_template_kwargs or {}), "chat_template": None},
                ),
            )
        except Exception as error:  # templates raise to refuse messages that they do not support
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise bad_request(f"The chat template refuses these messages: {reason[:200]}", "messages") from None
        check_rendered(prepared, str(text))
        return str(text)

    @staticmethod
    def _without_control_tokens(
        messages: Messages, body: ChatBody, control: ControlTokens
    ) -> tuple[Messages, ChatBody]:
        """What a template is to write of the client's, with stand-ins for control tokens."""
        hidden = control.hide_in_messages(messages)
        tools, variables = (control.hide_in(value) for value in (body.tools, body.chat_template_kwargs))
        if tools is not body.tools or variables is not body.chat_template_kwargs:
            body = structs.replace(body, tools=tools, chat_template_kwargs=variables)
        return hidden, body

    def _refuse_unservable(self, text: str, text_cache: KnownTexts) -> None:
        """Refuse a text that cannot fit the context however it is tokenized: tokenizing it would take seconds."""
        most_bytes = self.text_tokens_max * (text_cache.token_bytes_max or sys.maxsize)
        if len(text) > most_bytes or len(text.encode()) > most_bytes:
            raise context_exceeded(self._model, f"a prompt of {len(text)} characters")

    def _refuse_many_tokens(self, text: str, text_cache: KnownTexts) -> None:
        """Refuse a long text of far too many tokens, counted piece by piece: a tokenizer takes over a hundred bytes for
        each. A cut adds or saves a few tokens of thousands."""
        most = 2 * max(self.text_tokens_max, _COUNTED_CHARS)
        count = 0
        for begin in range(0, len(text), _COUNTED_CHARS):
            (piece,) = text_cache.tokenizer.encode_batch_fast(
                [text[begin : begin + _COUNTED_CHARS]], add_special_tokens=False
            )
            count += len(piece)
            if count > most:
                raise context_exceeded(self._model, f"a prompt of {len(text)} characters, more than {most} tokens")

    def _refuse_more_than_fit(self, tokens: int) -> None:
        if tokens > self.text_tokens_max:
            raise context_exceeded(self._model, f"{tokens} tokens in the prompt")


def common_tokens(tokens: TokenArray, further_tokens: TokenArray) -> int:
    """How many tokens both begin with."""
    length = min(len(tokens), len(further_tokens))
    differs = np.flatnonzero(tokens[:length] != further_tokens[:length])
    return int(differs[0]) if len(differs) else length


def calls_bounded(most: int, work: Callable[[], Result]) -> Result:
    """``work()``, or ``ValueError`` when it has made more than ``most`` calls in this thread."""
    calls_left, before = most, sys.getprofile()

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls_left
        calls_left -= event in ("call", "c_call")
        if calls_left < 0:
            raise ValueError("rendering them takes too long")

    sys.setprofile(count)
    try:
        return work()
    finally:
        sys.setprofile(before)


def context_exceeded(model: ServedModel, size_text: str) -> Exception:
    """400: prompt and answer do not fit into the served context."""
    note = f" (of this server: {model.context_note})" if model.context_note else ""
    limit = f"This model's maximum context length is {model.max_model_tokens} tokens{note}."
    message = f"{limit} However, your request has {size_text}. Please reduce the length of the input prompt."
    return bad_request(message, code="context_length_exceeded")


def is_token_list(value: Any) -> bool:
    """Whether ``value`` is one prompt of token ids: a list, or an array."""
    return isinstance(value, np.ndarray) or (isinstance(value, list) and set(map(type, value)) == {int})


_COUNTED_CHARS = 1 << 18

INLINE_BYTES_MAX = 2048
"""Tokenizing this much (0.5 ms) costs less than handing it to a thread and back."""

PARSING, CHECKING = 8, 8
"""How many times quicker than tokenizing text it is to parse the same bytes as JSON, and to check token ids in them."""

SHORT_BYTES_MAX = 16 * 1024
"""Tokenizing this much takes less than ten milliseconds: less than a step of the engine."""


TURNS_A_ROUND = 2
"""Requests that the event loop begins before it looks for what else has arrived: to look costs it a call of the system,
and a chance to lose the interpreter to another thread."""


class TextWorkers:
    """Runs work on clients' texts in threads where it would stall the event loop. Lives in the event loop.

    Parsing, chat templates and tokenizing take milliseconds to seconds for long texts. Tiny texts are processed in the
    event loop; short ones and long ones have one thread each, so that no short text waits for a long one. In each queue
    tenants take turns. The bodies that the server reads at a time bound what may wait.
    """

    def __init__(self) -> None:
        self._short, self._long = _Line("short"), _Line("long")
        self._turns = _Turns()

    async def wait_turn(self, tenant: str) -> None:
        """Wait until the event loop may begin a request of ``tenant``: at once, unless many arrive together."""
        await self._turns.wait_turn(tenant)

    async def run_work(self, tenant: str, text_bytes: int, work: Callable[[], Result]) -> Result:
        """The result of ``work`` on ``text_bytes`` of a tenant's text."""
        if text_bytes <= INLINE_BYTES_MAX:
            return work()
        worker = self._short if text_bytes <= SHORT_BYTES_MAX else self._long
        return await worker.run_work(tenant, work)

    def close(self) -> None:
        """Stop the threads."""
        self._short.close()
        self._long.close()


class _Waiting:
    """Waiting futures, one line per tenant; the lines take turns."""

    def __init__(self) -> None:
        #: the first tenant has the next turn
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}

    def add_waiter(self, tenant: str) -> asyncio.Future[None]:
        """Append a future to the tenant's line."""
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(turn)
        return turn

    def step_back(self, tenant: str) -> None:
        """``tenant`` has just had a turn without waiting: all others are before it."""
        if tenant in self._lines:
            self._lines[tenant] = self._lines.pop(tenant)

    def pass_on(self) -> bool:
        """Give the next future its turn; False: none waits."""
        while self._lines:
            tenant = next(iter(self._lines))
            turns = self._lines.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._lines[tenant] = turns
            if not turn.done():  # else its client has left
                turn.set_result(None)
                return True
        return False


class _Turns:
    """Of requests that arrive together, :data:`TURNS_A_ROUND` begin in each round of the event loop, and tenants take
    turns. So a burst of one tenant delays no other: between its requests the loop reads what else has arrived."""

    def __init__(self) -> None:
        self._waiting = _Waiting()
        self._turns_given = 0  # in this round
        self._last: str | None = None  # the tenant that has begun without waiting, in this round

    async def wait_turn(self, tenant: str) -> None:
        if self._turns_given >= TURNS_A_ROUND:
            await self._waiting.add_waiter(tenant)
        else:
            self._turns_given, self._last = self._turns_given + 1, tenant
            if self._turns_given == 1:
                asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        if self._last is not None:
            self._waiting.step_back(self._last)
        self._turns_given, self._last = 0, None
        while self._turns_given < TURNS_A_ROUND and self._waiting.pass_on():
            self._turns_given += 1
        if self._turns_given:
            asyncio.get_running_loop().call_soon(self._next_round)


class _Line:
    """One thread, and the work that waits for it."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"memserve-{name}-texts")
        self._is_busy = False
        self._waiting = _Waiting()

    async def run_work(self, tenant: str, work: Callable[[], Result]) -> Result:
        loop = asyncio.get_running_loop()
        if self._is_busy:
            await self._wait_turn(tenant)
        self._is_busy = True
        try:
            return await loop.run_in_executor(self._executor, work)
        finally:
            self._pass_on()

    async def _wait_turn(self, tenant: str) -> None:
        turn = self._waiting.add_waiter(tenant)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the turn came as its client left
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        self._is_busy = self._waiting.pass_on()

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
