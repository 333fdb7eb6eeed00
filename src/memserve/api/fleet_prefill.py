"""What an engine is sent that only computes a prompt, and what the engine gets that answers.

The words are vLLM's, whatever connector moves the KV: the first answers with ``kv_transfer_params``, which the second
is given. Nothing else of the client's request changes, and nothing of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_ASKS = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
_OF_ANSWERS = (
    "n", "best_of", "min_tokens", "stream_options", "logprobs", "top_logprobs", "max_completion_tokens",
    "response_format", "structured_outputs",
)  # fmt: skip
"""Fields that say how to answer: one token needs none of them, and some of them forbid it."""
_WHOLE = ("kv_transfer_params", "echo", "prompt_logprobs", "use_beam_search")
"""With these a request is not split: its client does so itself, or the engine that answers reads no KV of others."""
_NOTHING = (b"null", b"false")
_encode = msgspec.json.encode
Asked = Mapping[str, msgspec.Raw]


def may_split(asked: Asked) -> bool:
    """Whether one engine may compute the prompt and another one answer: it is one prompt, and nothing forbids it."""
    prompt = bytes(asked.get("prompt", b"")).lstrip()
    is_list = prompt.startswith(b"[") and prompt[1:].lstrip()[:1] in (b"[", b'"')
    return not is_list and all(bytes(asked.get(name, b"null")) in _NOTHING for name in _WHOLE)


def prefill_body(body: bytes) -> bytes:
    """The request of ``body``, a JSON object, for an engine that shall compute its prompt and keep the KV."""
    asked: dict[str, Any] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    chats = "max_completion_tokens" in asked
    for name in _OF_ANSWERS:
        asked.pop(name, None)
    if chats:
        asked["max_completion_tokens"] = 1
    return _encode({**asked, "max_tokens": 1, "stream": False, "kv_transfer_params": _ASKS})


def answering_body(body: bytes, computed: bytes) -> bytes:
    """The request of ``body`` for the engine that answers; ``computed``: what the first one said. Without its word the
    request goes on as it came."""
    params = msgspec.json.decode(computed, type=dict[str, msgspec.Raw]).get("kv_transfer_params")
    if params is None or not bytes(params).startswith(b"{"):
        return body
    asked: dict[str, Any] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return _encode({**asked, "kv_transfer_params": params})
