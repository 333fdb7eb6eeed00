"""``--engine vllm=URL,events=tcp://HOST:PORT,format=trtllm-json``: KV events as TensorRT-LLM's servers give them.

``/kv_cache_events`` of such a server answers with a JSON list; a few lines beside it publish each such list as the last
frame of a ZeroMQ message, behind a topic and a number. Which level a block moves to (``updated``) is left out: it stays
where it was first stored.
"""

import json
from typing import Any

from memserve.fleet.kv_formats import BlocksRemoved, BlocksStored, EngineKvEvent, KvBatch


def decode_trtllm(payload: bytes, /) -> KvBatch:
    messages = json.loads(payload)
    if not isinstance(messages, list):
        raise ValueError("not a list of events")
    rank = next((message.get("attention_dp_rank") or 0 for message in messages), 0)
    return KvBatch(rank, [event for message in messages for event in _events_of(message["data"])])


def _events_of(data: dict[str, Any]) -> list[EngineKvEvent]:
    if data["type"] == "removed":
        return [BlocksRemoved(data["block_hashes"], is_lower) for is_lower in (False, True)]  # it does not say where
    stored: list[EngineKvEvent] = []
    if data["type"] != "stored":
        return stored
    parent = data.get("parent_hash")
    for block in data["blocks"]:
        if block.get("lora_id") is not None or block.get("cache_salt"):
            break  # neither this one nor those behind it are for every request
        tokens = [token["token_id"] for token in block["tokens"]]
        stored.append(BlocksStored([block["block_hash"]], parent, tokens, len(tokens), block.get("cache_level", 0) > 0))
        parent = block["block_hash"]
    return stored
