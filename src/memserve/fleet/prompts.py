"""What the fleet machine must know of a request, read from its body: its model, its prompt in numbers, how long it is.

For requests that the router relays and for those of a gateway that only asks where they shall go.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from memserve.api.http.client import HttpFault
from memserve.api.http.errors import ApiError, bad_request, echo, model_not_found
from memserve.base.types import VOCAB_MAX, Request, StopParams, TokenArray
from memserve.base.units import MIB
from memserve.fleet.host import FleetHost
from memserve.fleet.messages import PromptArrived, PromptSpace

TOKENIZE_S = 1.0
"""How long an engine has to tokenize a prompt; without its tokens the prompt's text is compared."""
TEXT_BYTES_MAX = 4 * MIB
OUTPUT_TOKENS_USUAL = 256
RESPONSES = "/v1/responses"
_FOR_TOKENS = ("prompt", "messages", "tools", "tool_choice", "add_special_tokens", "add_generation_prompt",
               "continue_final_message", "chat_template", "reasoning_effort")  # fmt: skip
_FOR_TEMPLATE = ("reasoning_effort", "documents")
_WHOLE = ("kv_transfer_params", "echo", "prompt_logprobs", "use_beam_search")
"""With these a request is not split: its client does so itself, or the engine that answers reads no KV of others."""
_NOTHING = (b"null", b"false")
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
RequestFields = dict[str, msgspec.Raw]


def read_fields(body: bytes) -> RequestFields:
    """The fields of a request. Raises :class:`ApiError` 400 for anything but a JSON object."""
    try:
        return msgspec.json.decode(body, type=RequestFields)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(f"The request body is not a JSON object: {error}") from None


def read_field(fields: RequestFields, name: str, kind: type[Any]) -> Any | None:
    """A field, if it is there and of that kind; what is wrong with it the engine says better."""
    try:
        return msgspec.json.decode(fields[name], type=kind)
    except (KeyError, msgspec.DecodeError, RecursionError):
        return None


def may_split(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether one engine may compute the prompt and another one answer: it is one prompt, and nothing forbids it."""
    prompt = bytes(fields.get("prompt", b"")).lstrip()
    is_list = prompt.startswith(b"[") and prompt[1:].lstrip()[:1] in (b"[", b'"')
    return not is_list and all(bytes(fields.get(name, b"null")) in _NOTHING for name in _WHOLE)


def text_numbers(fields: RequestFields) -> TokenArray:
    """The prompt's text as int32, four bytes each. What continues a prompt begins with its numbers."""
    prompt = next((fields[name] for name in ("messages", "prompt", "input") if name in fields), b"")
    before = b"".join(bytes(fields.get(name, b"")) for name in ("tools", "system", "instructions"))
    # without the closing brackets: else no prompt would be the beginning of the one that continues it
    text = (before + bytes(prompt).rstrip(b"] \n\"'"))[:TEXT_BYTES_MAX]
    numbers = np.frombuffer(text[: len(text) // 4 * 4], np.int32) & np.int32(VOCAB_MAX - 1)
    return numbers if len(numbers) else np.zeros(1, np.int32)


class PromptReader:
    """Reads requests for the machine of ``host``, with the help of an engine's own tokenizer."""

    def __init__(self, host: FleetHost) -> None:
        self._host = host

    async def read_prompt(self, path: str, fields: RequestFields, tenant: str) -> PromptArrived:
        """The request of ``fields`` for ``path``. Raises :class:`ApiError` 404 and 400 for a model that no engine has,
        or that is not named, and 503 while none is known."""
        model, is_response = self._requested_model(fields), path == RESPONSES
        if is_response:  # no engine tokenizes them: it builds their prompts itself
            space, tokens = PromptSpace.TEXT, text_numbers(fields)
        else:
            space, tokens = await self._prompt_numbers(fields, model)
        most = next((limit for name in _LIMITS if (limit := read_field(fields, name, int))), None)
        salt = read_field(fields, "cache_salt", str)
        request = Request(
            uuid.uuid4().hex,
            tokens,
            stop=StopParams(max(1, most or OUTPUT_TOKENS_USUAL)),
            n=min(128, max(1, read_field(fields, "n", int) or 1)),
            tenant=tenant,
            salt=blake2b(salt.encode(), digest_size=16).hexdigest() if salt else "",
        )
        return PromptArrived(request, model, space, may_split(fields) and not is_response)

    def _requested_model(self, fields: RequestFields) -> str:
        models = self._host.engines_by_model()
        if not models:
            raise no_engine()
        name: str | None = read_field(fields, "model", str)
        if name is None and len(models) == 1:
            return str(next(iter(models)))
        if name is None:
            raise bad_request(f"Name one of the models: {echo(', '.join(models))}", "model")
        if name not in models:
            raise model_not_found(name, ", ".join(models))
        return name

    async def _prompt_numbers(self, fields: RequestFields, model: str) -> tuple[PromptSpace, TokenArray]:
        token_ids = read_field(fields, "prompt", list[int]) or next(
            iter(read_field(fields, "prompt", list[list[int]]) or ()), None
        )
        if token_ids and all(0 <= token < VOCAB_MAX for token in token_ids):
            return PromptSpace.TOKENS, np.array(token_ids, np.int32)
        engine = self._host.machine.tokenizing_engine(model)
        if engine is not None:
            tokens = await self._tokenize_prompt(engine, fields, model)
            if tokens is not None:
                return PromptSpace.TOKENS, tokens
        return PromptSpace.TEXT, text_numbers(fields)

    async def _tokenize_prompt(self, engine: str, request_fields: RequestFields, model: str) -> TokenArray | None:
        fields: dict[str, Any] = {name: request_fields[name] for name in _FOR_TOKENS if name in request_fields}
        template = read_field(request_fields, "chat_template_kwargs", RequestFields) or {}
        template |= {name: request_fields[name] for name in _FOR_TEMPLATE if name in request_fields}
        fields |= {"chat_template_kwargs": template} if template else {}
        several = read_field(request_fields, "prompt", list[str])
        # of several prompts the first one decides where all of them go
        if several:
            fields["prompt"] = several[0]
        with contextlib.suppress(HttpFault, msgspec.DecodeError, ValueError):
            body = msgspec.json.encode({"model": model, **fields})
            status, page = await self._host.client.fetch_page(
                self._host.specs[engine], "POST", "/tokenize", body, TOKENIZE_S
            )
            tokens = msgspec.json.decode(page, type=_Tokens).tokens if status == 200 else []
            if tokens and all(0 <= token < VOCAB_MAX for token in tokens):
                return np.array(tokens, np.int32)
        return None


class _Tokens(msgspec.Struct):
    tokens: list[int]


def no_engine() -> ApiError:
    """503: no engine has answered yet."""
    return ApiError(
        503, "No engine has answered yet", kind="server_error", code="no_engine", headers={"retry-after": "5"}
    )
