"""Fields of requests that memserve does not have: refused, or left out with a warning.

A field of vLLM's that only its own machinery can obey must not break a client that was written for vLLM, so it is left
out, named in the answer's ``x-memserve-ignored`` header and, once, in the log. Any other unknown field is most likely a
misspelt one, and refused, except with ``--lenient``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

log = logging.getLogger(__name__)

IGNORED_HEADER = "x-memserve-ignored"
NAMES_MAX, NAME_CHARS_MAX = 16, 64

FIELDS_OF_VLLM = {
    "bad_words", "chat_template_content_format", "documents", "ec_transfer_params", "include_reasoning",
    "include_stop_str_in_output", "kv_transfer_params", "media_io_kwargs", "mm_payload", "mm_processor_kwargs",
    "repetition_detection", "request_id", "return_mm_kwargs", "return_prompt_text", "return_token_offsets",
    "routed_experts_prompt_start", "spaces_between_special_tokens", "stream_interval", "thinking_token_budget",
    "vllm_xargs", "watermarking",
}  # fmt: skip
"""Of its completions and chats, without those that memserve has, and without those that name what is to be answered
(``prompt_embeds``) or how (``chat_template``): to ignore these would answer another question."""


class Leniency:
    """Which unknown fields are left out, and the log's warnings about them."""

    def __init__(self, *, all_fields: bool = False) -> None:
        self._all = all_fields
        self._told: set[str] = set()

    def without(self, fields: dict[str, Any], known: Iterable[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """``fields`` without those that are left out, and the names of these, as a header can carry them."""
        left_out = [name for name in fields if name not in known and (self._all or name in FIELDS_OF_VLLM)]
        kept = {name: value for name, value in fields.items() if name not in left_out}
        shown = [name[:NAME_CHARS_MAX] for name in left_out if name.isascii() and name.isidentifier()][:NAMES_MAX]
        for name in shown:
            self._warn(name)
        return kept, tuple(shown)

    def _warn(self, name: str) -> None:
        if name not in self._told and len(self._told) < NAMES_MAX:
            self._told.add(name)
            log.warning("requests have the field %r, which is not known here and has no effect", name)
