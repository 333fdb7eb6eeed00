"""The words that every level shares: tiers, requests, sampling, outputs."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from memserve.base.errors import UserError

TokenArray = NDArray[np.int32]
"""Token ids, shape ``[n]``, dtype int32, C-contiguous."""

VOCAB_MAX = 1 << 31
"""No model has more tokens: ids are int32."""


class Tier(enum.IntEnum):
    """Where a block lies. On a CPU machine HBM is the arena that attention reads."""

    HBM = 0
    DRAM = 1
    SSD = 2


LINKS = {
    "auto": "shared memory on one host, the cluster's encrypted channel between hosts",
    "trusted": "shared memory on one host, NIXL between hosts with RDMA (neither encrypted nor authenticated: for"
    " networks that no stranger reaches), the encrypted channel where an end has no RDMA adapter or no NIXL",
    "shm": "shared memory alone",
    "curve": "the encrypted channel alone",
    "nixl": "NIXL alone",
}
"""Value of ``--link`` -> how KV comes from other processes."""

FAR_LINKS = ("curve", "nixl")
"""Links between hosts, as ``PagesPulled`` names them; the others are those of one host."""


def check_link(link: str) -> None:
    """Raise :class:`UserError` for what is none of :data:`LINKS`."""
    if link not in LINKS:
        raise UserError(f"unknown link {link!r}", hint=f"use one of {', '.join(LINKS)}", param="link")


KvCodecMode = Literal["auto", "none", "always"]
KV_CODECS: Mapping[str, KvCodecMode] = {"auto": "auto", "none": "none", "always": "always"}
"""Values of ``--kv-codec``: where it pays, nowhere, everywhere."""


def check_kv_codec(kv_codec: str) -> None:
    """Raise :class:`UserError` for what is none of :data:`KV_CODECS`."""
    if kv_codec not in KV_CODECS:
        hint = f"use one of {', '.join(KV_CODECS)}"
        raise UserError(f"unknown --kv-codec {kv_codec!r}", hint=hint, param="kv_codec")


class Role(enum.StrEnum):
    """What a member does. Prefill, decode and colocated instances have the same pool."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"
    ENGINE = "engine"  # a server of another project runs the model, and keeps its KV to itself
    STORE = "store"  # no model: memory and index only
    ROUTER = "router"  # no model, no memory: a router that is not the owner of the cluster

    @property
    def has_model(self) -> bool:
        return self not in (Role.STORE, Role.ROUTER)

    @property
    def shares_kv(self) -> bool:
        """Whether it runs the model on blocks of the pool, which can be moved, pinned and handed over."""
        return self.has_model and self is not Role.ENGINE


class TransferMode(enum.StrEnum):
    """How a prompt's KV goes from prefill to decode (MemServe 5.2)."""

    BY_LAYER = "by-layer"  # each layer's pages as soon as that layer is computed
    BY_REQUEST = "by-request"  # after the prefill (of a chunk), page by page
    BY_REQUEST_AGG = "by-request-agg"  # after the prefill (of a chunk), in whole blocks


class TransferPolicy(enum.StrEnum):
    """Which of these ways an operator wants: one for all requests, or the quickest for each."""

    AUTO = "auto"
    BY_LAYER = TransferMode.BY_LAYER.value
    BY_REQUEST = TransferMode.BY_REQUEST.value
    BY_REQUEST_AGG = TransferMode.BY_REQUEST_AGG.value

    @property
    def mode(self) -> TransferMode | None:
        """That of all requests. None: each has its own."""
        return _MODES[self]


#: to make a member of its value takes longer than all that a request asks of it
_MODES: dict[TransferPolicy, TransferMode | None] = {
    TransferPolicy.AUTO: None,
    **{TransferPolicy(mode.value): mode for mode in TransferMode},
}


class Caching(enum.StrEnum):
    """Which instances cache KV, and what travels between prefill and decode (MemServe 5.1)."""

    OFF = "off"  # PD-Basic: none
    PD_CACHING_1 = "pd-caching-1"  # prefill instances
    PD_CACHING_2 = "pd-caching-2"  # decode instances too: only what they lack is sent
    PD_CACHING_3 = "pd-caching-3"  # and generated KV goes back to the prefill instance


class RequestLogFormat(enum.StrEnum):
    """How the HTTP server logs requests: one line each, without their content."""

    NONE = "none"
    TEXT = "text"  # name=value pairs
    JSON = "json"  # one object a line


class Admission(enum.StrEnum):
    """What the router checks before it admits a request."""

    NONE = "none"  # nothing: every request is admitted
    BOUNDED = "bounded"  # how many requests are active
    MEMORY = "memory"  # and whether an instance has memory for all of it
    CACHE = "cache"  # as memory, but prefixes that active requests share count once


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or the model's context reached
    CANCELLED = "cancelled"  # the client went away
    DEADLINE = "deadline"  # the request's deadline passed
    ERROR = "error"  # the device failed, or this sequence's own row did


class SamplingParams(msgspec.Struct, frozen=True):
    """How the next token is drawn from the logits (OpenAI's meanings and ranges).

    Drawing is stateless: token ``i`` of sequence ``k`` depends only on the logits and ``(seed, k, i)``. So a sequence
    that is preempted or migrated continues as it would have: exactly in float32, but for ties in the last digits; in
    bfloat16 other rows of a step can change how a logit is rounded.
    """

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # the edge draws one when the client gives none
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # how many alternatives to report beside the chosen token; None = no logprobs
    prompt_logprobs: bool = False  # report logprobs of the prompt too (``echo`` with ``logprobs``)
    prompt_top_logprobs: int | None = None  # alternatives to each token of the prompt; None = as many as ``logprobs``
    logprob_token_ids: tuple[int, ...] = ()  # report these instead of the best alternatives
    allowed_token_ids: tuple[int, ...] = ()  # draw from these alone; empty = from all
    grammar: str = ""  # draw what this grammar allows (:mod:`memserve.model.grammar.masks`); empty = anything

    @property
    def changes_logits(self) -> bool:
        """Whether penalties, a bias, a list of tokens or a grammar apply."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.allowed_token_ids
            or self.grammar
        )


class StopParams(msgspec.Struct, frozen=True):
    """When a sequence ends. Stop *strings* are found by the edge, which then posts ``SequenceStopped``."""

    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # includes the model's end-of-sequence ids unless they are ignored


class PositionRegimes(msgspec.Struct, frozen=True):
    """Of a model with positions that depend on a sequence's length (longrope, dynamic NTK): what decides for a token.

    Prompts of up to ``original_tokens`` are computed with the positions of pretraining, longer ones with others. The
    prompt decides, and an answer keeps its prompt's regime; with ``by_length`` each length has positions of its own,
    and tokens of the answer beyond ``original_tokens`` those of the length at which they come, as in transformers'
    ``generate``. KV of different regimes is never shared: the regime is a part of the request's salt."""

    original_tokens: int = 0
    """0: positions are what they are at any length."""
    by_length: bool = False

    def regime_of(self, prompt_tokens: int) -> str:
        """The regime of a prompt; empty: that of pretraining."""
        if not self.original_tokens or prompt_tokens <= self.original_tokens:
            return ""
        return f"length{prompt_tokens}" if self.by_length else "long"

    def deciding_lengths(self, prompt_tokens: Any, positions: Any) -> Any:
        """Which length decides for tokens at ``positions [T]`` of sequences with ``prompt_tokens [T]``: ``[T]``."""
        return np.maximum(prompt_tokens, positions + 1) if self.by_length else prompt_tokens


NO_REGIMES = PositionRegimes()
"""Of nearly every model."""

_ADAPTER = "lora-"


def salt_of(salt: str, adapter: str, regime: str = "") -> str:
    """``Request.salt`` for the digests of a client's own salt and of an adapter, and for a regime of positions
    (:class:`PositionRegimes`); each may be empty."""
    return "-".join(part for part in (adapter and _ADAPTER + adapter, regime, salt) if part)


def adapter_of(salt: str) -> str:
    """The digest of the adapter in a :func:`salt_of`; empty: none."""
    return salt.removeprefix(_ADAPTER).partition("-")[0] if salt.startswith(_ADAPTER) else ""


def isolation(tenant: str, salt: str) -> str:
    """Name of the KV that requests of ``tenant`` with ``salt`` (:func:`salt_of`) share among themselves."""
    return tenant if not salt else f"{tenant}\x1f{salt}"


def tenant_of(isolation: str) -> str:
    """The tenant with this :func:`isolation`."""
    return isolation.partition("\x1f")[0]


@dataclass(frozen=True, slots=True)
class NamedPrefix:
    """A prefix that is kept from eviction under a name of its tenant: a document's or a session's."""

    handle: str
    pinned_tokens: int | None
    """``None``: not known yet."""
    expires_ns: int


class Pooling(msgspec.Struct, frozen=True):
    """How a model makes an embedding of the hidden states of a text's tokens."""

    kind: str  # last: that of the last token; mean: the mean of all
    normalizes: bool  # to length 1
    sizes: tuple[int, ...] | None = None  # to which it may be cut; empty: any, None: none
    size: int = 0  # numbers of a hidden state
    prompts: tuple[tuple[str, str], ...] = ()  # what goes before a text, by what the text is


DEFERRABLE_PRIORITY = (1 << 31) - 1
"""The highest ``priority`` that a request may have: it runs behind all others, of all tenants."""


class Request(msgspec.Struct, frozen=True):  # not a dataclass: the router renames it 40 times as fast
    """One generation request as a machine sees it: token ids in, token ids out."""

    request_id: str
    prompt: TokenArray
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    stop: StopParams = msgspec.field(default_factory=StopParams)
    n: int = 1  # sequences drawn from the same prompt
    beam_width: int = 0  # > 0: beam search with this many beams, of which the best ``n`` are returned
    length_penalty: float = 1.0  # beam search: score = sum of logprobs / generated_tokens ** length_penalty
    tenant: str = ""  # the API key's name: turns, weights, limits and metrics are by tenant
    priority: int = 0  # orders the requests of one tenant: lower runs first
    deadline_ns: int | None = None  # absolute, same clock as ``handle(event, now_ns)``
    use_cache: bool = True  # may read and fill the prefix cache
    session: str = ""  # named by the client: the session policy keeps its requests together
    weight: int = 1  # of its tenant: its share of service relative to weight 1, set by the operator
    urgency: int = 0  # orders the requests of all tenants, before the tenants' turns; set by the operator
    salt: str = ""  # of the client's ``cache_salt`` and the adapter: KV is shared only within (tenant, salt)
    slo_ttft_ns: int | None = None  # the time that its first token may take; a request that asks for less is rejected
    slo_tpot_ns: int | None = None  # the time that each further token may take; None: the instance's objective
    # its client will ask for the answer again by it (:mod:`memserve.protocol.idempotency`): unique over all tenants
    key: str = ""
    asked: str = ""  # digest of what the client asked with ``key``
    created_s: int = 0  # with ``key``: seconds since 1970, when the client asked first
    nonprefix_reuse: bool = False  # KV of the same tokens behind others may stand in: the answer is not exact

    @property
    def isolation(self) -> str:
        """Name of the KV that the request may read and fill. It only separates KV."""
        return isolation(self.tenant, self.salt)

    @property
    def adapter(self) -> str:
        """Digest of the LoRA adapter that computes it; empty: none. What it is read from separates KV as well, so that
        KV of one adapter can never be another's."""
        return adapter_of(self.salt)

    @property
    def needs_instance(self) -> bool:
        """Whether members of role ``engine`` cannot answer it: their API has nothing like what it asks for."""
        sampling = self.sampling
        asks_more = sampling.grammar or sampling.prompt_logprobs or sampling.logprob_token_ids
        return bool(self.adapter or self.beam_width or asks_more or self.stop.max_tokens < 1)

    @property
    def is_deferrable(self) -> bool:
        """Whether it runs behind all others, of all tenants."""
        return self.priority == DEFERRABLE_PRIORITY


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position, after penalties and bias, before temperature and truncation."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), best first


class TokenOutput(msgspec.Struct, frozen=True):
    """One step's output of one sequence. A struct, not a dataclass: a step makes hundreds, each 14 times as fast."""

    request_id: str
    index: int  # which of the request's ``n`` sequences
    tokens: tuple[int, ...]  # new tokens, usually one
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token when asked for
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens with KV from the cache: with the first output; of an engine with the last
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # first output, when asked for
    cumulative_logprob: float | None = None  # beam search only
    queue_ns: int | None = None  # first output: from arrival to the first step that computed any of the prompt
    story: tuple[tuple[str, str | int | float], ...] = ()
    """First and last output: what was decided and done for this request, and why (fetched, reused, moved ...)."""
    error: str = ""
    """With ``FinishReason.ERROR``: what failed in this sequence, as on any instance; empty: the instance failed.
    """
    offset: int = 0
    """Tokens of this sequence that were generated before these: with it the router recognises outputs that come twice,
    late, before those of another sender, or with some lost in between."""
    hidden: bytes = b""
    """First output of a model that embeds: the pooled hidden state of the prompt, float32."""
    inexact_tokens: int = 0  # as ``cached_tokens``: with KV that was computed behind other tokens, not counted there


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy whole blocks ``src[i] -> dst[i]`` between (or inside) tiers."""

    src_tier: Tier
    dst_tier: Tier
    src: list[int]
    dst: list[int]


COARSE_BITS, FINE_BITS = ACTIVATION_BITS = (8, 15)
"""How many bits activations may be rounded to before they meet weights that are computed with as they are stored. The
first may change answers, the second rounds less than bfloat16."""

AS_COMPUTED = "auto"
"""Of values of KV: as they were computed."""
_CODE_BITS = {"int8": 8, "fp8": 8, "int4": 4}
KV_DTYPES = (AS_COMPUTED, *_CODE_BITS)
"""Of values of KV. All but ``auto`` are codes, with a maximum for each group of them, and not lossless."""

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_SIZE_MAX = 1 << 20
_UNIT_BITS = 32
_MAXIMUM_BYTES = 2
_HEAD_ALIGN = 64
INT4_GROUP = 32
"""Elements that one maximum of int4 is of."""


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape of the KV cache of one model. Both ends of any transfer compare it.

    A *page* is one layer's K and V of one block of tokens, heads outermost; inside a head K is
    ``[head_dim_k, block_tokens]`` and V is ``[block_tokens, head_dim_v]``. A *block* is ``num_layers`` pages in a row.
    With a ``kv_dtype`` a head has codes and their maxima instead: ``src/kernels/kv_codes.h``.

    Where layers keep latents (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434), a page has one head and no
    V: a key is a token's latent with its rotary key behind it, and its first ``head_dim_v`` elements are the value.
    """

    num_layers: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: str  # "float32" | "bfloat16" | "float16": of what is computed
    block_tokens: int = 32
    kv_dtype: str = AS_COMPUTED  # of what is kept
    latent: bool = False  # whether a value begins its key, and is not kept again

    def __post_init__(self) -> None:
        if self.dtype not in _ITEMSIZE:
            raise UserError(f"unknown dtype {self.dtype!r}", hint=f"use one of {', '.join(_ITEMSIZE)}", param="dtype")
        if self.kv_dtype not in KV_DTYPES:
            hint = f"use one of {', '.join(KV_DTYPES)}"
            raise UserError(f"unknown KV dtype {self.kv_dtype!r}", hint=hint, param="kv_dtype")
        for name in ("num_layers", "num_kv_heads", "head_dim_k", "head_dim_v", "block_tokens"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= _SIZE_MAX:
                raise UserError(
                    f"{name} of a KV geometry is {value!r}", hint=f"give an integer in [1, {_SIZE_MAX}]", param=name
                )
        if self.latent and (self.num_kv_heads != 1 or self.head_dim_v > self.head_dim_k):
            shape = f"{self.num_kv_heads} heads, keys of {self.head_dim_k} elements, values of {self.head_dim_v}"
            raise UserError(
                f"latents of {shape}", hint="a latent is one head, and begins with the value", param="latent"
            )

    @property
    def kept_dims(self) -> tuple[int, int]:
        """Elements of one token that a head of a page has in K, and in V."""
        return self.head_dim_k, 0 if self.latent else self.head_dim_v

    @property
    def itemsize(self) -> int:
        """Bytes of a value that is computed."""
        return _ITEMSIZE[self.dtype]

    @property
    def code_depth(self) -> int:
        """Codes in a unit: neighbours in a head (K), or tokens (V). 0: values lie as they were computed."""
        return _UNIT_BITS // _CODE_BITS[self.kv_dtype] if self.kv_dtype != AS_COMPUTED else 0

    def code_groups(self, head_dim: int) -> int:
        """Groups with a maximum each, of ``head_dim`` elements of one token's K or V."""
        return -(-head_dim // INT4_GROUP) if self.kv_dtype == "int4" else min(1, head_dim)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of a page."""
        tokens, dims, depth = self.block_tokens, self.kept_dims, self.code_depth
        if not depth:
            return tokens * sum(dims) * self.itemsize
        units = -(-dims[0] // depth) * tokens + -(-tokens // depth) * dims[1]
        maxima = sum(map(self.code_groups, dims)) * tokens
        nbytes = units * _UNIT_BITS // 8 + maxima * _MAXIMUM_BYTES
        return -(-nbytes // _HEAD_ALIGN) * _HEAD_ALIGN

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer's K and V of one block."""
        return self.num_kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.page_bytes * self.num_layers

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers."""
        return self.block_bytes // self.block_tokens

    @property
    def token_formula(self) -> str:
        """Where :attr:`token_bytes` come from, for people."""
        kept = f"1 latent x {self.head_dim_k} elements"
        if not self.latent:
            kept = f"{self.num_kv_heads} heads x ({self.head_dim_k} K + {self.head_dim_v} V) elements"
        size = f"{self.itemsize} bytes" if self.kv_dtype == AS_COMPUTED else f"codes of {self.kv_dtype}"
        return f"{self.num_layers} layers x {kept} x {size}"


@dataclass(frozen=True, slots=True)
class ClockTicked:
    """Time passed: deadlines may have passed."""
