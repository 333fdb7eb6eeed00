"""How engines write their KV events: a format for each, by the name in ``--engine ...,format=NAME``.

vLLM and SGLang write msgpack, ``[time, [event, ...], data parallel rank]``. An event is a map with ``type``; up to vLLM
0.22 an array that begins with it. Blocks are named by the engine's own hashes, and their tokens come along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from memserve.base.plugins import KV_EVENT_FORMATS
from memserve.base.types import VOCAB_MAX

BLOCK_TOKENS_MAX = 1 << 20
Hash = int | bytes


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """The engine has these blocks in its cache now, one behind the other."""

    hashes: Sequence[Hash]
    """The engine's own names of the blocks."""
    parent: Hash | None
    """Of the block before the first one. None: a prompt begins with it."""
    tokens: Sequence[int]
    """Ids, ``block_tokens`` for each block."""
    block_tokens: int
    is_lower: bool = False
    """They lie where attention does not read them: in host memory, or on a disk."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """One copy of each of these blocks is gone from its tier."""

    hashes: Sequence[Hash]
    is_lower: bool = False


@dataclass(frozen=True, slots=True)
class AllBlocksRemoved:
    """The cache is empty."""


EngineKvEvent = BlocksStored | BlocksRemoved | AllBlocksRemoved


class KvBatch(NamedTuple):
    """One message of an engine."""

    rank: int
    """Which of the engine's publishers has numbered it: 0 where there is one."""
    events: Sequence[EngineKvEvent]
    """In order. Without blocks that only some requests find: those of an adapter, a salt or an image."""


class KvEventFormat(Protocol):
    """How one message is read: what an entry point of ``memserve.kv_event_formats`` names."""

    def __call__(self, payload: bytes, /) -> KvBatch:
        """What the last frame of a message says; the frames before it, a topic and the message's number (8 bytes, big
        endian), are the same in every format. Raises ``ValueError`` for what is no such message.

        A pure function of its argument, called in the router's one thread for every message of every engine: it must
        not wait. Whatever it raises, and events that contradict themselves, let the router forget the engine's blocks:
        its requests go by load until more is heard; other engines are not concerned."""


def guarded_format(name: str) -> Callable[[bytes], KvBatch]:
    """The format of that name, which raises ``ValueError`` alone, and gives what can be applied. Raises
    :class:`UserError` where there is none."""
    decode: KvEventFormat = KV_EVENT_FORMATS.load(name)

    def read(payload: bytes) -> KvBatch:
        try:
            batch = decode(payload)
            check_batch(batch)
        except Exception as error:  # a plug-in's
            raise ValueError(f"{name}: {type(error).__name__}: {error}") from error
        return batch

    return read


def check_batch(batch: KvBatch) -> None:
    """Raise ``ValueError`` for a batch that cannot be applied."""
    rank, events = batch
    if not isinstance(rank, int):
        raise ValueError(f"rank {rank!r}")
    for event in events:
        if not isinstance(event, EngineKvEvent):
            raise ValueError(f"{type(event).__name__} is no event")
        if isinstance(event, AllBlocksRemoved):
            continue
        if not all(isinstance(block_hash, Hash) for block_hash in event.hashes):
            raise ValueError("hashes of blocks are integers or bytes")
        if isinstance(event, BlocksStored):
            _check_stored(event)


def _check_stored(event: BlocksStored) -> None:
    size, tokens = event.block_tokens, event.tokens
    if not isinstance(size, int) or not 0 < size <= BLOCK_TOKENS_MAX:
        raise ValueError("a stored block has a size")
    if len(tokens) != size * len(event.hashes):
        raise ValueError(f"{len(tokens)} tokens are not {len(event.hashes)} blocks of {size}")
    if not all(isinstance(token, int) and 0 <= token < VOCAB_MAX for token in tokens):
        raise ValueError("a token id is a number below 2^31")
    if not isinstance(event.parent, int | bytes | None):
        raise ValueError("the hash of the block before is an integer or bytes")


# -- vLLM and SGLang

_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
           "extra_keys", "group_idx")  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx")
_UPPER = (None, "GPU")
"""Media that attention reads. All others are a lower tier."""
_decode_msgpack = msgspec.msgpack.Decoder().decode


def decode_vllm(payload: bytes) -> KvBatch:
    """A message of vLLM or SGLang. Raises ``ValueError`` for anything else."""
    try:
        batch = _decode_msgpack(payload)
    except msgspec.DecodeError as error:
        raise ValueError(f"not msgpack: {error}") from None
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise ValueError("a batch is [time, events, rank]")
    rank = batch[2] if len(batch) > 2 and batch[2] is not None else 0
    return KvBatch(rank, [event for words in batch[1] if (event := _read_event(words)) is not None])


def _read_event(words: Any) -> EngineKvEvent | None:
    """None: it concerns no block, or one that only some requests find."""
    if isinstance(words, list) and words:
        names = {"BlockStored": _STORED, "BlockRemoved": _REMOVED}.get(str(words[0]), ())
        words = {"type": words[0], **dict(zip(names, words[1:], strict=False))}
    if not isinstance(words, dict):
        raise ValueError("an event is a map")
    kind = words.get("type")
    if kind == "AllBlocksCleared":
        return AllBlocksRemoved()
    if kind not in ("BlockStored", "BlockRemoved"):
        return None
    hashes, is_lower = words.get("block_hashes"), words.get("medium") not in _UPPER
    if not isinstance(hashes, list):
        raise ValueError("block_hashes are integers or bytes")
    if kind == "BlockRemoved":
        event: EngineKvEvent = BlocksRemoved(hashes, is_lower)
    else:
        size, tokens = words.get("block_size"), words.get("token_ids")
        if not isinstance(size, int) or not isinstance(tokens, list):
            raise ValueError("a stored block has token_ids and a block_size")
        event = BlocksStored(hashes, words.get("parent_block_hash"), tokens, size, is_lower)
    if _is_for_all(words):
        return event
    check_batch(KvBatch(0, [event]))  # what is left out is to be well-formed, too
    return None


def _is_for_all(words: dict[str, Any]) -> bool:
    """Whether any request with these tokens finds the block: not with an adapter, a salt or an image, nor in memory of
    another process. Of a model with several kinds of layers the first group counts."""
    is_private = any(words.get(name) is not None for name in ("lora_id", "lora_name", "cache_salt"))
    is_private = is_private or any(keys for keys in words.get("extra_keys") or ())
    return not is_private and words.get("group_idx") in (None, 0) and words.get("locality") != "REMOTE"
