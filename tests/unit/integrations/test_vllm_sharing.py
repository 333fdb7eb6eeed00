"""Which requests of vLLM's share KV with memserve's instances, and how their blocks are called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from memserve import UserError
from memserve.base.types import KVGeometry
from memserve.integrations.vllm.memory import BlockLayout
from memserve.integrations.vllm.shared_kv import Identities, KvNames, Sharing, has_regimes, is_plain
from memserve.kv.identity import block_identities, namespace_id
from memserve.protocol.store import KvModel

KEY, BLOCK = b"k" * 16, 4
MODEL = KvModel("weights", KVGeometry(2, 1, 8, 8, "float32", BLOCK))


def request_of(tokens: int, **more: Any) -> Any:
    ids = list(range(100, 100 + tokens))
    return SimpleNamespace(request_id="r", num_tokens=tokens, all_token_ids=ids, **more)


def test_blocks_are_called_as_instances_call_them() -> None:
    """Whether they are named at once, or one after the other while an answer grows."""
    request, identities = request_of(6), Identities("team", MODEL, KEY)
    tokens = np.arange(100, 118, dtype=np.int32)
    wanted = block_identities(namespace_id("team", "weights", KEY), tokens, BLOCK, KEY)
    assert identities.identities_of(request, 9) == wanted[:1]
    request.all_token_ids, request.num_tokens = tokens.tolist(), len(tokens)
    assert [identities.identities_of(request, blocks) for blocks in (2, 1, 9)] == [wanted[:2], wanted[:1], wanted]
    assert len(identities) == 1
    identities.forget_request("r")
    assert not len(identities)


def test_tenants_and_models_have_other_names() -> None:
    request = request_of(BLOCK)
    others = [Identities("", MODEL, KEY), Identities("team", MODEL, KEY), Identities("", MODEL, b"l" * 16)]
    others.append(Identities("", KvModel("other weights", MODEL.geometry), KEY))
    assert len({one.identities_of(request, 1)[0] for one in others}) == len(others)


@pytest.mark.parametrize(
    ("more", "plain"),
    [
        ({}, True), ({"mm_features": [], "lora_request": None, "cache_salt": None, "prompt_embeds": None}, True),
        ({"cache_salt": ""}, True), ({"mm_features": [1]}, False), ({"lora_request": object()}, False),
        ({"cache_salt": "s"}, False), ({"prompt_embeds": [0.5]}, False),
    ],
)  # fmt: skip
def test_requests_with_more_than_tokens_are_not_shared(more: dict[str, Any], plain: bool) -> None:
    assert is_plain(request_of(4, **more)) is plain


def test_a_shared_block_has_no_tail() -> None:
    names = KvNames(b"", BlockLayout((8, 8), b"digest"))
    value = names.value_of(b"i" * 16)
    assert (value.name, value.stored_bytes, value.payload_bytes) == (b"i" * 16, 16, 16)
    assert value.encode_tail(np.zeros(2, np.uint64)) == b""


def test_options_are_read_apart() -> None:
    found = Sharing.from_config({"share_with_memserve": True, "memserve_tenant": "team", "pool": "x:1"})
    assert (found.is_on, found.tenant, found.other_options) == (True, "team", {"pool": "x:1"})
    assert not Sharing.from_config({}).is_on
    for wrong in ({"share_with_memserve": "yes"}, {"memserve_tenant": 3}):
        with pytest.raises(UserError, match="on or off"):
            Sharing.from_config(wrong)


@pytest.mark.parametrize(
    ("found", "depends"),
    [
        ({}, False), ({"rope_scaling": None}, False), ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, False),
        ({"rope_scaling": {"type": "longrope"}}, True), ({"rope_parameters": {"rope_type": "dynamic"}}, True),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}, "sliding_attention": None}}, True),
    ],
)  # fmt: skip
def test_positions_that_depend_on_lengths_are_not_shared(found: dict[str, Any], depends: bool) -> None:
    assert has_regimes(SimpleNamespace(**found)) is depends
