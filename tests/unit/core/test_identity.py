"""Block identity: SipHash-2-4-128 against its published vectors, and the chain against a plain Python one."""

from __future__ import annotations

import numpy as np
import pytest

from memserve import _core
from memserve.base.config import ClusterConfig, PoolConfig
from memserve.base.types import Tier
from memserve.kv.identity import DEFAULT_KEY, block_identities, identity_key, namespace_id
from memserve.kv.pool import BlockPool
from memserve.router.outbox import Timers
from memserve.router.placement.prefix_directory import Trees
from memserve.router.report import Counters

KEY = bytes(range(16))
# vectors.h of the reference implementation, vectors_sip128: message = bytes(range(length)), key = bytes(range(16))
VECTORS = {
    0: "a3817f04ba25a8e66df67214c7550293",
    1: "da87c1d86b99af44347659119b22fc45",
    2: "8177228da4a45dc7fca38bdef60affe4",
    3: "9c70b60c5267a94e5f33b6b02985ed51",
    4: "f88164c12d9c8faf7d0f6e7c7bcd5579",
    5: "1368875980776f8854527a07690e9627",
    6: "14eeca338b208613485ea0308fd7a15e",
    7: "a1f1ebbed8dbc153c0b84aa61ff08239",
    8: "3b62a9ba6258f5610f83e264f31497b4",
}


def rotate(x: int, by: int) -> int:
    return ((x << by) | (x >> (64 - by))) & (2**64 - 1)


def siphash128(key: bytes, data: bytes) -> bytes:
    """The algorithm as its paper tells it, in Python integers."""
    mask = 2**64 - 1
    k0, k1 = (int.from_bytes(key[i : i + 8], "little") for i in (0, 8))
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D ^ 0xEE, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]

    def rounds(count: int) -> None:
        for _ in range(count):
            v[0] = (v[0] + v[1]) & mask
            v[1] = rotate(v[1], 13) ^ v[0]
            v[0] = rotate(v[0], 32)
            v[2] = (v[2] + v[3]) & mask
            v[3] = rotate(v[3], 16) ^ v[2]
            v[0] = (v[0] + v[3]) & mask
            v[3] = rotate(v[3], 21) ^ v[0]
            v[2] = (v[2] + v[1]) & mask
            v[1] = rotate(v[1], 17) ^ v[2]
            v[2] = rotate(v[2], 32)

    padded = data + bytes(-(len(data) + 1) % 8) + bytes([len(data) % 256])
    for at in range(0, len(padded), 8):
        word = int.from_bytes(padded[at : at + 8], "little")
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xEE
    rounds(4)
    low = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(4)
    return low.to_bytes(8, "little") + (v[0] ^ v[1] ^ v[2] ^ v[3]).to_bytes(8, "little")


@pytest.mark.parametrize("length", sorted(VECTORS))
def test_published_vectors(length: int) -> None:
    assert _core.siphash128(KEY, bytes(range(length))).hex() == VECTORS[length]


@pytest.mark.parametrize("length", [*range(64), 255, 256, 1000])
def test_equals_the_paper_at_every_length(length: int) -> None:
    message = bytes(i % 256 for i in range(length))
    assert _core.siphash128(KEY, message) == siphash128(KEY, message)


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 16, 32])
def test_chain(block_tokens: int) -> None:
    namespace = namespace_id("tenant", "model")
    tokens = np.array([5, -1, 2**31 - 1, 0, *range(100)], dtype=np.int32)
    parent, want = namespace, []
    for at in range(0, len(tokens) // block_tokens * block_tokens, block_tokens):
        words = tokens[at : at + block_tokens].astype("<i4").tobytes()
        parent = siphash128(KEY, parent + words)
        want.append(parent)
    assert block_identities(namespace, tokens, block_tokens, KEY) == want


def test_stable_across_releases() -> None:
    """Other processes and machines compute the same: these bytes may never change."""
    namespace = namespace_id("tenant", "model")
    name = len(b"tenant").to_bytes(8, "little") + b"tenantmodel"
    assert namespace == siphash128(b"memserve-kv-0001", name)


def test_namespaces_do_not_run_together() -> None:
    names = [("a", "bc"), ("ab", "c"), ("", "abc"), ("abc", "")]
    assert len({namespace_id(*name) for name in names}) == len(names)


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        _core.siphash128(b"short", b"")
    with pytest.raises(ValueError, match="positive"):
        _core.block_identities(KEY, KEY, [1, 2], 0)


# -- the key of a cluster


def cached_by(secret: str | None) -> bytes:
    """What an instance tells of a cached prompt of three blocks, where its cluster has this secret."""
    key = None if secret is None else identity_key(secret)
    pool = BlockPool(PoolConfig(8, identity_key=key), 4, "model", event_capacity=16)
    pool.insert("tenant", np.arange(12, dtype=np.int32), pool.allocate(3), 3)
    cached = pool.cached_identities(Tier.HBM)
    assert b"".join(name for event in pool.take_events() for name in event.identities) == cached
    assert cached[-16:] == pool.identity("tenant", np.arange(12, dtype=np.int32))
    return cached


def looked_up_by(secret: str) -> bytes:
    """What the router of that cluster looks for when the prompt comes again."""
    trees = Trees(ClusterConfig(), Timers(), Counters(), identity_key(secret))
    return trees.prompt_identities("tenant", "model", np.arange(12, dtype=np.int32), 4)


def test_a_cluster_names_blocks_by_its_own_secret() -> None:
    assert cached_by("ours") == cached_by("ours") == looked_up_by("ours")
    told = [cached_by("ours"), cached_by("theirs"), cached_by(None)]
    names = [each[at : at + 16] for each in told for at in range(0, 48, 16)]
    assert len(set(names)) == 9
    assert looked_up_by("theirs") == told[1] != looked_up_by("ours")


def test_the_key_of_a_cluster_is_no_public_one_and_is_not_shown() -> None:
    key = identity_key("secret")
    assert len(key) == 16 and key != DEFAULT_KEY and b"secret" not in key
    assert "identity_key" not in repr(PoolConfig(8, identity_key=key))
