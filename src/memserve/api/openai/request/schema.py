"""The request bodies: every field that is understood, tolerated or refused.

Parsing is strict: a field of the wrong type or out of range, or one that is not listed, is a 400 that names it.
Names and ranges are OpenAI's; the fields under "extensions" are memserve's, under vLLM's names where vLLM has them.

Fields of requests that memserve does not have: refused, or left out with a warning.

A field of vLLM's that only its own machinery can obey must not break a client that was written for vLLM, so it is left
out, named in the answer's ``x-memserve-ignored`` header and, once, in the log. Any other unknown field is most likely a
misspelt one, and refused, except with ``--lenient``.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from memserve._core import json_shape
from memserve.api.http.errors import ApiError, bad_request, unsupported
from memserve.api.openai.kv_hints import KvHintsEnvelope

log = logging.getLogger(__name__)

IGNORED_HEADER = "x-memserve-ignored"
INEXACT_HEADER = "x-memserve-inexact"
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
        self._drops_all = all_fields
        self._warned_names: set[str] = set()

    def drop_unknown(
        self, fields: dict[str, Any], known_names: Iterable[str]
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """``fields`` without those that are left out, and the names of these, as a header can carry them."""
        left_out = [name for name in fields if name not in known_names and (self._drops_all or name in FIELDS_OF_VLLM)]
        known_fields = {name: value for name, value in fields.items() if name not in left_out}
        shown = [name[:NAME_CHARS_MAX] for name in left_out if name.isascii() and name.isidentifier()][:NAMES_MAX]
        for name in shown:
            self._warn_once(name)
        return known_fields, tuple(shown)

    def _warn_once(self, name: str) -> None:
        if name not in self._warned_names and len(self._warned_names) < NAMES_MAX:
            self._warned_names.add(name)
            log.warning("requests have the field %r, which is not known here and has no effect", name)


TokenCount = Annotated[int, Meta(ge=1)]
TokenCountOrZero = Annotated[int, Meta(ge=0)]
Choices = Annotated[int, Meta(ge=1, le=128)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
PositiveProbability = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=10)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 30)]
LogprobCount = Annotated[int, Meta(ge=0, le=20)]
Priority = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
ModelName = Annotated[str, Meta(max_length=4096)]
ShortText = Annotated[str, Meta(max_length=512)]
SessionName = Annotated[str, Meta(min_length=1, max_length=200)]
ObjectiveMs = Annotated[float, Meta(gt=0, le=86_400_000)]
Ttl = Annotated[float, Meta(gt=0, le=604_800)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
BiasMap = Annotated[dict[str, Bias], Meta(max_length=1024)]
StopText = Annotated[str, Meta(min_length=1, max_length=1000)]
Stops = StopText | Annotated[list[StopText], Meta(max_length=32)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
StopIds = Annotated[list[TokenId], Meta(max_length=128)]
AllowedIds = Annotated[list[TokenId], Meta(min_length=1, max_length=1 << 17)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    """Send one more chunk at the end, with `usage` and empty `choices`."""
    include_obfuscation: bool | None = None
    """Accepted, no effect: chunks are never padded."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: each chunk carries the `usage` so far."""


class AnswerBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """How an answer is drawn, and where it runs: the fields of chats, completions and responses alike."""

    NO_EFFECT: ClassVar[tuple[str, ...]] = ("service_tier", "safety_identifier")
    """Fields that promise nothing: accepted, and named in the answer's :data:`IGNORED_HEADER`."""

    model: ModelName | None = None
    """The served model's name, one of its aliases, or an adapter's; letter case does not matter. Default: the served
    model."""
    kv_hints: KvHintsEnvelope | None = None
    """What to do with the request's KV when it has ended: see `POST /v1/kv_hints`."""
    temperature: Temperature | None = None
    """0: greedy. Default: what the model's `generation_config.json` recommends, else 1."""
    top_p: PositiveProbability | None = None
    """Draw from the smallest set of tokens with this probability mass. Default: recommended, else 1."""
    presence_penalty: Penalty | None = None
    """Subtracted from the logit of every token that was generated before."""
    frequency_penalty: Penalty | None = None
    """Subtracted once for each time that the token was generated before."""
    seed: Seed | None = None
    """With equal logits, equal seeds draw equal answers. Default: random."""
    stop: Stops | None = None
    """A text, or up to 32: the answer ends before the first that appears."""
    logit_bias: BiasMap | None = None
    """Maps token ids to numbers that are added to their logits."""
    stream: bool | None = None
    """Send the answer as server-sent events while it is computed."""

    # Hints: they decide where a request runs and what stays cached, never the answer.
    prompt_cache_key: str | None = None
    """Requests with the same key run where their prefix is cached, as with `session`."""

    # Tolerated: the official client sends these fields, and they cannot change the answer here.
    service_tier: str | None = None
    """Accepted, no effect."""
    safety_identifier: str | None = None
    """Accepted, no effect."""

    # Extensions.
    top_k: TopK | None = None
    """Draw from this many tokens. 0 or -1: from all. Default: recommended, else all."""
    min_p: Probability | None = None
    """Drop tokens less probable than this share of the most probable one."""
    repetition_penalty: RepetitionPenalty | None = None
    """Lowers the logits of tokens that the prompt or the answer contains. 1: off."""
    stop_token_ids: StopIds | None = None
    """Tokens that end the answer, in addition to the model's own."""
    ignore_eos: bool | None = None
    """Go on after the model's end-of-sequence token."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text. Default true."""
    structured_outputs: dict[str, Any] | None = None
    """The form of the answer: an object with one of `choice` (a list of texts), `regex`, `json` (a JSON schema),
    `json_object` (true), or `grammar` (Lark, or GBNF)."""
    priority: Priority | None = None
    """Lower runs first, among requests of the same tenant."""
    timeout_s: Seconds | None = None
    """Seconds after which the request ends with 504."""
    use_cache: bool | None = None
    """false: neither read nor fill the prefix cache."""
    cache_salt: ShortText | None = None
    """A request shares cached KV only with requests of the same tenant and the same salt."""


class GenerationBody(AnswerBody, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What both generating endpoints share."""

    NO_EFFECT: ClassVar[tuple[str, ...]] = (*AnswerBody.NO_EFFECT, "user", "store", "metadata")

    n: Choices | None = None
    """Answers to draw from each prompt. Default 1."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""

    # Tolerated: the official client sends these fields, and they cannot change the answer here.
    user: str | None = None
    """Accepted, no effect."""
    store: bool | None = None
    """Accepted, no effect."""
    metadata: dict[str, str] | None = None
    """Accepted, no effect."""

    # Extensions.
    min_tokens: TokenCountOrZero | None = None
    """The answer does not end before this many tokens."""
    allowed_token_ids: AllowedIds | None = None
    """Draw from these tokens alone."""
    response_format: dict[str, Any] | None = None
    """`{"type": "json_schema", "json_schema": {"schema": ...}}`: an answer that the schema admits. `json_object`: any
    JSON object. `text`: anything."""
    logprob_token_ids: StopIds | None = None
    """Report the log probabilities of these tokens instead of the most probable ones. Only with `logprobs`."""
    prompt_logprobs: LogprobCount | None = None
    """Report the log probabilities of the prompt's tokens, and of this many alternatives to each, as vLLM does. Not
    with `stream`."""
    return_token_ids: bool | None = None
    """Report the token ids of prompt and answer: `prompt_token_ids` and `token_ids`."""
    return_tokens_as_token_ids: bool | None = None
    """Name tokens in logprobs `token_id:N` instead of by their text."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Cut each prompt to this many tokens. -1: to what the context has room for."""
    truncation_side: Literal["left", "right"] | None = None
    """Where `truncate_prompt_tokens` cuts. Default `left`."""
    use_beam_search: bool | None = None
    """Return the best `n` beams instead of drawing."""
    beam_width: Choices | None = None
    """Beams that are kept. Default `n`. Only with `use_beam_search`."""
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    """Beams are ranked by the sum of logprobs divided by length to this power. Default 1."""
    slo_ttft_ms: ObjectiveMs | None = None
    """Milliseconds that the first token may take. Where that cannot be expected, the request is rejected at once."""
    slo_tpot_ms: ObjectiveMs | None = None
    """Milliseconds that each further token may take on average. Default: the server's `--slo-tpot-ms`. Steps are
    planned by it with `--scheduling slo`."""
    exact: bool | None = None
    """true: refuse the request where its KV may be rounded, that is with `--kv-dtype` or `--kv-lower-dtype` (400)."""
    nonprefix_reuse: bool | None = None
    """true: KV of the same text from behind other text may stand in, with `--nonprefix-reuse`. Then the answer is not
    exact, and has the header `x-memserve-inexact`: how many tokens of the prompt were reused so. Not with
    `exact`, nor for several prompts with `stream`."""
    explain: bool | None = None
    """Report where the time to the first token went and what was decided, in the answer's `memserve`."""
    session: SessionName | None = None
    """Name of a conversation: its requests run where their KV is."""
    session_id: SessionName | None = None
    """Another name of `session`."""
    session_ttl_s: Ttl | None = None
    """Seconds for which the session's KV is kept from eviction after the answer."""
    document: ShortText | None = None
    """Begin with this document, which was put for this endpoint: see `PUT /v1/documents/{id}`."""


class DocumentBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``PUT /v1/documents/{id}``: either ``text`` or ``messages``."""

    text: str | None = None
    """The document as text, for completions, or as a system message for chats. This or `messages`."""
    messages: list[Any] | None = None
    """The document as the beginning of a conversation. This or `text`."""
    ttl_s: Ttl | None = None
    """Seconds for which its KV is kept from eviction, from the answer on. Default 3600."""
    endpoint: Literal["chat", "completions"] | None = None
    """Which requests may begin with it: `chat` or `completions`."""
    model: ShortText | None = None
    """The model or adapter that computes it, and that requests with it ask for. Default: the served model."""


class CompletionBody(GenerationBody, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /v1/completions``."""

    prompt: Any | UnsetType = UNSET
    """A text, token ids, or a list of texts or of lists of token ids."""
    max_tokens: TokenCountOrZero | None = None
    """Longest answer. Default 16. 0 only with `echo`."""
    best_of: Choices | None = None
    """Sequences to draw; the best `n` are returned. With `stream` only if equal to `n`."""
    echo: bool | None = None
    """Put the prompt in front of the answer."""
    logprobs: LogprobCount | None = None
    """Report the log probabilities of the chosen tokens, and of this many alternatives to each."""
    suffix: str | None = None
    """Refused unless empty."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add its special tokens to text prompts. Default true."""


class ChatBody(GenerationBody, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    NO_EFFECT: ClassVar[tuple[str, ...]] = (
        *GenerationBody.NO_EFFECT, "prompt_cache_retention", "prompt_cache_options", "prediction", "verbosity",
    )  # fmt: skip

    messages: list[Any] | UnsetType = UNSET
    """The conversation: objects with `role` (system, developer, user, assistant, tool) and `content` (a string, or
    text parts); assistants may have `tool_calls` and `reasoning_content`."""
    max_tokens: TokenCount | None = None
    """Longest answer. Default: the server's `--default-max-tokens`, at most what the context has room for."""
    max_completion_tokens: TokenCount | None = None
    """OpenAI's newer name of `max_tokens`."""
    logprobs: bool | None = None
    """Report the chosen tokens' log probabilities."""
    top_logprobs: LogprobCount | None = None
    """Alternatives to each token whose log probabilities are reported. Only with `logprobs`."""

    # Extensions.
    echo: bool | None = None
    """Begin the answer with the last message, if it is the assistant's."""
    add_generation_prompt: bool | None = None
    """End the prompt with the beginning of an answer. Default true."""
    continue_final_message: bool | None = None
    """Continue the last message instead of answering it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""

    # Tolerated: hints that cannot change the answer here.
    prompt_cache_retention: Any = None
    """Accepted, no effect."""
    prompt_cache_options: Any = None
    """Accepted, no effect."""
    prediction: Any = None
    """Accepted, no effect."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Accepted, no effect: how long answers are is the model's choice, and `max_tokens`."""

    tools: Any = None
    """Functions that the model may call: calls come back as `tool_calls`."""
    tool_choice: Any = None
    """`none`: no call. `auto` (the default with `tools`): the model decides. `required`: at least one.
    `{"type": "function", "function": {"name": ...}}`: this one."""
    parallel_tool_calls: bool | None = None
    """false: at most one call in an answer."""

    # Refused unless they ask for what happens anyway (see REFUSED).
    functions: Any = None
    """Refused unless empty: use `tools`."""
    function_call: Any = None
    """`none` or `auto`; anything else is refused."""
    modalities: Any = None
    """Refused unless `["text"]`."""
    audio: Any = None
    """Refused."""
    moderation: Any = None
    """Refused."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """A variable of the chat template; no effect where the template has no such variable."""
    web_search_options: Any = None
    """Refused."""


REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "suffix": ("Inserting text before a suffix", ("",)),
    "functions": ("Function calling (use tools)", ([],)),
    "function_call": ("Function calling (use tools)", ("none", "auto")),
    "modalities": ("Any modality other than text", (["text"],)),
    "audio": ("Audio output", ()),
    "moderation": ("Moderation", ()),
    "web_search_options": ("Web search", ()),
}
"""Field -> what it asks for, and the values that ask for nothing."""


DEPTH_MAX = 64
NAME_BYTES_MAX = 1024
CONTAINERS_MAX = 1 << 15
VALUES_MAX = 1 << 18
"""Decoding a body within these limits holds the interpreter for at most ten milliseconds."""

_MESSAGE_CHARS_MAX = 2000
_NAME_CHARS_MAX = 64

Body = TypeVar("Body", bound=msgspec.Struct)
Decoded = TypeVar("Decoded")

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")


def parse_body(data: bytes, kind: type[Body]) -> Body:
    """``data`` as ``kind``. Raises :class:`ApiError` 400 that names the field at fault."""
    return parse_leniently(data, kind, None)[0]


def parse_leniently(data: bytes, kind: type[Body], leniency: Leniency | None) -> tuple[Body, tuple[str, ...]]:
    """``data`` as ``kind``, and the names of the fields without effect: those that promise nothing, and those that
    ``leniency`` has left out. Raises :class:`ApiError` 400
    that names the field at fault."""
    refuse_shape(data)
    try:
        body = _decoded(data, kind)
    except msgspec.ValidationError as error:
        if leniency is None or not _UNKNOWN.search(str(error)):
            raise _explain(str(error), kind) from None
        return _without_unknown(data, kind, leniency)
    refuse_unsupported(body)
    return body, without_effect(body)


def without_effect(body: msgspec.Struct) -> tuple[str, ...]:
    """The fields of ``body`` that are set and promise nothing."""
    names: tuple[str, ...] = getattr(body, "NO_EFFECT", ())
    return tuple([name for name in names if getattr(body, name) is not None])


def _without_unknown(data: bytes, kind: type[Body], leniency: Leniency) -> tuple[Body, tuple[str, ...]]:
    try:
        everything = _decoded(data, dict[str, Any])
    except msgspec.ValidationError as error:  # a number that no JSON reader here can hold
        raise _explain(str(error), kind) from None
    fields, left_out = leniency.drop_unknown(everything, kind.__struct_fields__)
    body = body_of(fields, kind)
    return body, (*left_out, *without_effect(body))


def _decoded(data: bytes, kind: type[Decoded]) -> Decoded:
    """``data`` as ``kind``. Raises :class:`ApiError` 400 for what is no JSON; ``msgspec.ValidationError`` for another
    kind, at the first value that shows it, so that what follows may still be no JSON."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        raise bad_request(f"The request body is not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise bad_request(f"The request body is not valid UTF-8: {error.reason}") from None


def body_of(fields: dict[str, Any], kind: type[Body]) -> Body:
    """``fields``, of builtin types, as ``kind``: for callers in this process. Raises as :func:`parse_body`."""
    try:
        body = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from None
    refuse_unsupported(body)
    return body


def refuse_shape(data: bytes, *, more_values: int = 0, more_containers: int = 0) -> None:
    """Raises :class:`ApiError` 400 for JSON that would take long to decode. What was cut out of ``data`` had
    ``more_values``, and ``more_containers`` of one level."""
    shape = json_shape(data)
    values, containers = shape.values + more_values, shape.containers + more_containers
    if shape.depth > DEPTH_MAX:
        raise bad_request(f"The request body is nested {shape.depth} deep; the limit is {DEPTH_MAX}")
    if shape.name_bytes > NAME_BYTES_MAX:
        raise bad_request(f"A field's name has {shape.name_bytes} bytes; the limit is {NAME_BYTES_MAX}")
    if containers > CONTAINERS_MAX:
        raise bad_request(f"The request body has {containers} arrays and objects; the limit is {CONTAINERS_MAX}")
    if values > VALUES_MAX:
        raise bad_request(f"The request body has {values} values; the limit is {VALUES_MAX}")


def _explain(message: str, kind: type[Body]) -> ApiError:
    if len(message) > _MESSAGE_CHARS_MAX:  # a message that repeats a value
        message = message[: _MESSAGE_CHARS_MAX // 2] + " ... " + message[-_MESSAGE_CHARS_MAX // 2 :]
    path = _PATH.search(message)
    param = path.group(1) if path else None
    message = message[: path.start()] if path else message
    if unknown := _UNKNOWN.search(message):
        name = unknown.group(1)
        names = (
            []
            if param or len(name) > _NAME_CHARS_MAX
            else [field for field in kind.__struct_fields__ if field not in REFUSED]
        )
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        full = f"{param}.{name}" if param else name
        return bad_request(f"Unknown field '{full}'{hint}", full, "unknown_field")
    if missing_field := _MISSING.search(message):
        name = missing_field.group(1)
        return bad_request(f"The field '{name}' is required", name, "missing_required_parameter")
    prefix = f"Invalid value for '{param}': " if param else "Invalid request body: "
    return bad_request(prefix + message[:1].lower() + message[1:], param, "invalid_value")


def refuse_unsupported(body: msgspec.Struct) -> None:
    """Raises :class:`ApiError` 400 for a field of :data:`REFUSED` that asks for something."""
    for field in _refusable(type(body)):
        value = getattr(body, field)
        if value is None:
            continue
        feature, harmless = REFUSED[field]
        if value not in harmless:
            raise unsupported(field, feature)


@lru_cache
def _refusable(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field for field in REFUSED if field in kind.__struct_fields__)
