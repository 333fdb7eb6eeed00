"""KV events as vLLM and SGLang publish them, for tests."""

from __future__ import annotations

from typing import Any

import msgspec

BLOCK = 4


def stored(hashes: list[int | bytes], parent: int | bytes | None, tokens: list[int], **more: Any) -> dict[str, Any]:
    """Blocks of :data:`BLOCK` tokens."""
    first = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
    return {**first, "block_size": BLOCK, "lora_id": None, "medium": "GPU", "lora_name": None, **more}


def removed(hashes: list[int | bytes], **more: Any) -> dict[str, Any]:
    """These blocks are gone."""
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", **more}


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: Any, rank: int | None = None) -> bytes:
    """A batch as it is sent."""
    return msgspec.msgpack.encode([1.5, list(events), rank])


def as_array(event: dict[str, Any]) -> list[Any]:
    """The same event as vLLM encoded it up to 0.22."""
    if event["type"] == "BlockRemoved":
        return ["BlockRemoved", event["block_hashes"], event["medium"]]
    names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    return ["BlockStored", *(event[name] for name in names)]
