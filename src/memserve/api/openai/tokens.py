"""``POST /tokenize`` and ``/detokenize``, ``GET /tokenizer_info``: as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from memserve.api.http.errors import bad_request, model_not_found
from memserve.api.http.limits import TENANT_KEY, json_body
from memserve.api.http.middleware import json_page
from memserve.api.openai.endpoints import EndpointParts
from memserve.api.openai.interfaces import ModelNames
from memserve.api.openai.request.messages import check_messages
from memserve.api.openai.request.prompts import text_bytes_max
from memserve.api.openai.request.schema import ChatBody, ModelName, TokenId, parse_body
from memserve.api.openai.response.responders import send_json


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /tokenize``: either ``prompt`` or ``messages``."""

    model: ModelName | None = None
    """The served model's name. Default: the one that is served."""
    prompt: str | None = None
    """A text. This or `messages`."""
    messages: list[Any] | None = None
    """A conversation, through the chat template. This or `prompt`."""
    tools: Any = None
    """Functions that the chat template describes. Only with `messages`."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add its special tokens. Default: true for a text, false for a conversation."""
    add_generation_prompt: bool | None = None
    """End a conversation with the beginning of an answer. Default true."""
    continue_final_message: bool | None = None
    """Leave the last message open."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    return_token_strs: bool | None = None
    """Answer with the tokens' names as well."""


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /detokenize``."""

    model: ModelName | None = None
    """The served model's name. Default: the one that is served."""
    tokens: Annotated[list[TokenId], Meta(max_length=1 << 18)]
    """Token ids."""


class TokenRoutes:
    """Texts and tokens, in the threads where prompts are tokenized."""

    def __init__(self, shared: EndpointParts, names: ModelNames) -> None:
        self._shared, self._names = shared, names

    def routes(self) -> list[Route]:
        """As the application has them."""
        return [
            Route("/tokenize", _Endpoint(self._shared, self._tokenize_body), methods=["POST"]),
            Route("/detokenize", _Endpoint(self._shared, self._detokenize_body), methods=["POST"]),
            Route("/tokenizer_info", self.get_info),
        ]

    async def get_info(self, request: Request) -> Response:
        """``GET /tokenizer_info``: what a client needs to make prompts of conversations itself."""
        tokenizer = self._shared.model.tokenizer
        fields = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        info = {name: getattr(tokenizer, name, None) for name in fields}
        info |= {"tokenizer_class": type(tokenizer).__name__, "model_max_length": self._shared.model.max_model_tokens}
        return json_page(info)

    def _tokenize_body(self, data: bytes) -> dict[str, Any]:
        body, encoder = parse_body(data, TokenizeBody), self._shared.encoder
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt", "missing_required_parameter")
        if body.prompt is not None:
            special, text, field = body.add_special_tokens is not False, body.prompt, "prompt"
        else:
            fields = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
            chat = ChatBody(model=self._names.served, **{name: getattr(body, name) for name in fields})
            special, field = bool(body.add_special_tokens), "messages"
            text = encoder.chat_text(chat, check_messages(body.messages))
        self._check_length(text, field)
        tokens = encoder.token_ids(text, add_special_tokens=special)
        token_names = [encoder.tokenizer.id_to_token(token) for token in tokens] if body.return_token_strs else None
        longest = self._shared.model.max_model_tokens
        return {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": token_names}

    def _detokenize_body(self, data: bytes) -> dict[str, Any]:
        body = parse_body(data, DetokenizeBody)
        self._check_model(body.model)
        vocab_size = self._shared.encoder.vocab_size
        if foreign := [token for token in body.tokens if token >= vocab_size]:
            message = f"tokens: token id {foreign[0]} is out of vocabulary [0, {vocab_size})"
            raise bad_request(message, "tokens", "invalid_value")
        return {"prompt": self._shared.encoder.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    def _check_length(self, text: str, field: str) -> None:
        most_bytes = text_bytes_max(self._shared.model)
        if len(text) > most_bytes or len(text.encode()) > most_bytes:
            message = f"{field}: a text of {len(text)} characters; at most {most_bytes} bytes are tokenized at a time"
            raise bad_request(f"{message}: send it in parts", field, "string_above_max_length")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            raise model_not_found(name, self._names.served)


class _Endpoint:
    def __init__(self, shared: EndpointParts, work: Any) -> None:
        self._shared, self._work = shared, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with json_body(scope, receive, self._shared.edge) as data:
            workers, tenant = self._shared.encoder.workers, scope[TENANT_KEY]
            await workers.wait_turn(tenant)
            answer = await self._shared.encoder.run_work(tenant, len(data), data, lambda: self._work(data))
        await send_json(send, 200, msgspec.json.encode(answer))
