"""Names that are the same on every process and machine: namespaces and blocks (level 1).

``identity[i] = SipHash-2-4-128(key, identity[i-1] || tokens of block i as little-endian int32)``, starting from the
namespace. A block's identity therefore names its whole prefix.
"""

from __future__ import annotations

from memserve import _core
from memserve.types import TokenArray

DEFAULT_KEY = b"memserve-kv-0001"
"""16 bytes. Clusters that share KV share the key; a secret one makes identities unforgeable."""

NAMES_MAX = 1024
"""Names of namespaces that a pool, or a router, keeps at hand."""


def namespace_id(tenant: str, fingerprint: str, key: bytes = DEFAULT_KEY) -> bytes:
    """16 bytes that name (tenant, model and weights, dtype, layout); different inputs never share KV.

    The tenant's length goes first, so that no two pairs spell the same message.
    """
    name = tenant.encode("utf-8", "surrogatepass")
    message = len(name).to_bytes(8, "little") + name + fingerprint.encode("utf-8", "surrogatepass")
    return _core.siphash128(key, message)


def block_identities(
    namespace: bytes, tokens: TokenArray, block_tokens: int, key: bytes = DEFAULT_KEY, first: int = 0
) -> list[bytes]:
    """The identity of each whole block of ``tokens`` from block ``first`` on, 16 bytes each."""
    packed = _core.block_identities(key, namespace, tokens, block_tokens)
    return [packed[at : at + 16] for at in range(16 * first, len(packed), 16)]
