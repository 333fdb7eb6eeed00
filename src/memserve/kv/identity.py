"""Names of namespaces and blocks, equal on every process and machine of a cluster.

``identity[i] = SipHash-2-4-128(key, identity[i-1] || tokens of block i as little-endian int32)``, starting from the
namespace. A block's identity therefore names its whole prefix.

The key is derived from the cluster's secret. Identities follow from what clients send, and decide the place in the
router's directory: with a public key, a client could compute prompts whose blocks all fall into one place, which makes
every look-up slow; and a reader of the journal could test which prompts were cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from memserve import _core
from memserve.base.states import BehindKv
from memserve.base.types import TokenArray
from memserve.kv.store_shares import KEY_BYTES, split_keys

DEFAULT_KEY = b"memserve-kv-0001"
"""16 bytes, public: for pools that share their identities with no other cluster member (one engine alone, the
simulator)."""

NAMES_MAX = 1024
"""Largest number of namespace names that a pool or a router caches."""


_NAMES_KV = "kv="


def secrets_in(text: str) -> tuple[str, ...]:
    """The secrets in the text of a secret file, one a line: that of this process first, then those that other members
    may still, or already, have while the secret is being changed."""
    lines = (line.strip() for line in text.splitlines())
    return tuple(line for line in lines if line and not line.startswith(_NAMES_KV))


def kv_secret(text: str) -> str:
    """The secret that KV is named after: that of this process, or that of a line ``kv=SECRET``, where the secret has
    changed since the KV was computed."""
    lines = (line.strip() for line in text.splitlines())
    kv_secrets = [line.removeprefix(_NAMES_KV) for line in lines if line.startswith(_NAMES_KV)]
    return (*kv_secrets, *secrets_in(text), "")[0]


def identity_key(text: str) -> bytes:
    """The key of the cluster with this secret: 16 bytes, from which the secret cannot be found."""
    return blake2b(kv_secret(text).encode(), digest_size=16, person=b"memserve-kv").digest()


def namespace_id(tenant: str, fingerprint: str, key: bytes = DEFAULT_KEY) -> bytes:
    """16 bytes that name (tenant, model and weights, dtype, layout); different inputs never share KV.

    The tenant's length goes first, so that no two pairs spell the same message.
    """
    name = tenant.encode("utf-8", "surrogatepass")
    message = len(name).to_bytes(8, "little") + name + fingerprint.encode("utf-8", "surrogatepass")
    return _core.siphash128(key, message)


def state_identities(identity: bytes, count: int, key: bytes = DEFAULT_KEY) -> list[bytes]:
    """The identities of the ``count`` blocks with the recurrent state behind a block of this ``identity``, 16 bytes
    each. No block of tokens has one of them: its message has another length."""
    return [_core.siphash128(key, identity + place.to_bytes(8, "little") + b"state") for place in range(count)]


def part_identities(identity: bytes, count: int, key: bytes = DEFAULT_KEY) -> list[bytes]:
    """The identities of the ``count`` blocks with the KV of layers that read a window, for the tokens of the block of
    this ``identity``; as :func:`state_identities`."""
    return [_core.siphash128(key, identity + place.to_bytes(8, "little") + b"part") for place in range(count)]


def names_behind(identities: Sequence[bytes], blocks: int, part_blocks: int, key: bytes = DEFAULT_KEY) -> list[bytes]:
    """Of what comes behind the KV of blocks of these ``identities``: a snapshot in ``blocks``, or (``part_blocks``) the
    parts of a window, of so many each, in as many blocks at most."""
    if not part_blocks:
        return state_identities(identities[-1], blocks, key) if identities else []
    own = identities[max(0, len(identities) - blocks // part_blocks) :]
    return [name for identity in own for name in part_identities(identity, part_blocks, key)]


def pack_behind(identities: bytes, behind: BehindKv, block_tokens: int, key: bytes = DEFAULT_KEY) -> bytes:
    """Of all that comes ``behind`` the KV of a prefix whose blocks have these ``identities``, 16 bytes each."""
    blocks = behind.count_blocks(len(identities) // KEY_BYTES * block_tokens)
    if not blocks:
        return b""
    last_blocks = blocks // behind.part_blocks if behind.part_blocks else 1
    last_keys = split_keys(identities[-last_blocks * KEY_BYTES :])
    return b"".join(names_behind(last_keys, blocks, behind.part_blocks, key))


def block_identities(
    namespace: bytes, tokens: TokenArray, block_tokens: int, key: bytes = DEFAULT_KEY, first: int = 0
) -> list[bytes]:
    """The identity of each whole block of ``tokens`` from block ``first`` on, 16 bytes each."""
    return split_keys(_core.block_identities(key, namespace, tokens, block_tokens))[first:]
