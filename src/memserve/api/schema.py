"""The request bodies: every field that is understood, tolerated or refused (level 4).

Parsing is strict: a field of the wrong type or out of range, or one that is not listed, is a 400 that names it.
Names and ranges are OpenAI's; the fields under "extensions" are memserve's own, where vLLM has them under its names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

TokenCount = Annotated[int, Meta(ge=1)]
TokenCountOrZero = Annotated[int, Meta(ge=0)]
Choices = Annotated[int, Meta(ge=1, le=128)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
PositiveProbability = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=10)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 30)]
LogprobCount = Annotated[int, Meta(ge=0, le=20)]
Priority = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
ShortText = Annotated[str, Meta(max_length=512)]
SessionName = Annotated[str, Meta(min_length=1, max_length=200)]
Ttl = Annotated[float, Meta(gt=0, le=604_800)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
BiasMap = Annotated[dict[str, Bias], Meta(max_length=1024)]
StopText = Annotated[str, Meta(min_length=1, max_length=1000)]
Stops = StopText | Annotated[list[StopText], Meta(max_length=32)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
StopIds = Annotated[list[Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]], Meta(max_length=128)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # tolerated: chunks are never padded


class GenerationBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What both generating endpoints share."""

    model: str
    n: Choices | None = None
    temperature: Temperature | None = None
    top_p: PositiveProbability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    logit_bias: BiasMap | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Hints: where it runs and what stays cached, never the answer.
    prompt_cache_key: str | None = (
        None  # requests with the same key run where their prefix is: OpenAI's word for session
    )

    # Tolerated: the official client sends them, they cannot change the answer here.
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None

    # Extensions.
    top_k: TopK | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: TokenCountOrZero | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    beam_width: Choices | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    priority: Priority | None = None
    timeout_s: Seconds | None = None
    use_cache: bool | None = None
    cache_salt: ShortText | None = None
    explain: bool | None = None
    session: SessionName | None = None  # requests of one session are kept together, and their KV with them
    session_id: SessionName | None = None  # the same
    session_ttl_s: Ttl | None = None  # keep the session's KV from eviction for so long after the answer
    document: ShortText | None = None  # begin with this document: see /v1/documents


class DocumentBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``PUT /v1/documents/{id}``: either ``text`` or ``messages``."""

    text: str | None = None
    messages: list[Any] | None = None
    ttl_s: Ttl | None = None
    endpoint: Literal["chat", "completions"] | None = None


class CompletionBody(GenerationBody, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /v1/completions``."""

    prompt: Any | UnsetType = UNSET  # string, strings, token ids, or lists of token ids
    max_tokens: TokenCountOrZero | None = None
    best_of: Choices | None = None
    echo: bool | None = None
    logprobs: LogprobCount | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class ChatBody(GenerationBody, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[Any] | UnsetType = UNSET
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None

    # Extensions.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Tolerated: hints that cannot change the answer here.
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    prediction: Any = None
    parallel_tool_calls: bool | None = None

    tools: Any = None  # for the chat template; calls come back as text

    # Refused unless they ask for what happens anyway (see REFUSED).
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    moderation: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "suffix": ("Inserting text before a suffix", ("",)),
    "tool_choice": ("Forcing a tool call", ("none", "auto")),
    "functions": ("Function calling (use tools)", ([],)),
    "function_call": ("Function calling (use tools)", ("none", "auto")),
    "response_format": ("Any response_format other than text", ({"type": "text"},)),
    "modalities": ("Any modality other than text", (["text"],)),
    "audio": ("Audio output", ()),
    "moderation": ("Moderation", ()),
    "reasoning_effort": ("Choosing a reasoning effort", ("none",)),
    "verbosity": ("Choosing a verbosity", ("medium",)),
    "web_search_options": ("Web search", ()),
}
"""Field -> what it asks for, and the values that ask for nothing."""
