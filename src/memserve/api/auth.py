"""API keys, and the tenants they stand for."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

from memserve.api.errors import unauthorized
from memserve.errors import UserError
from memserve.runtime.private_files import Followed

_NO_KEY = re.compile(r"[^=]*=")
"""``NAME=``: what is left of ``NAME=$KEY`` when the variable is empty. It must not become a key."""
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})=(.*[^=].*)")


ApiKeys = Sequence[str] | Followed[tuple[str, ...]]
"""As given on the command line: ``KEY``, or ``NAME=KEY`` for a tenant of its own. Those of a file may change."""

_Tenants = list[tuple[bytes, str]]


class KeyRing:
    """Maps API keys to tenants. Tenants never share KV."""

    def __init__(self, keys: ApiKeys = ()) -> None:
        """Raises :class:`UserError` for malformed keys; in a file that changes, they change nothing."""
        followed = keys if isinstance(keys, Followed) else Followed.fixed(tuple(keys))
        self._held = followed.then(_tenants_of)

    @property
    def _tenants(self) -> _Tenants:
        return self._held.value()

    @property
    def is_open(self) -> bool:
        """No key is required."""
        return not self._tenants

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an ``Authorization`` header. Raises :class:`ApiError` 401.

        The digest of every key is compared in constant time, so the duration reveals neither a key nor its length.
        """
        if self.is_open:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        digest = _digest(given.strip().encode("utf-8", "surrogateescape"))
        found = [tenant for known, tenant in self._tenants if hmac.compare_digest(known, digest)]
        if scheme.lower() != "bearer" or not found:
            raise unauthorized()
        return found[0]


def _tenants_of(keys: Sequence[str]) -> _Tenants:
    found: dict[bytes, str] = {}
    for text in keys:
        tenant, key = _split(text)
        digest = _digest(key.encode())
        if digest in found:
            raise UserError("the same API key is given twice", hint="one key belongs to one tenant", param="api_key")
        found[digest] = tenant
    return list(found.items())


def _split(text: str) -> tuple[str, str]:
    """Tenant and key of ``KEY`` or ``NAME=KEY``. Raises :class:`UserError` for an empty key, in either form."""
    named = _NAMED.fullmatch(text)
    tenant, key = named.groups() if named else ("", text)
    if not key or _NO_KEY.fullmatch(text):
        hint = "is a variable unset? Give a key that itself ends with = as NAME=KEY"
        raise UserError("an API key is empty", hint=hint, param="api_key")
    if not key.isascii() or not key.isprintable() or any(char.isspace() for char in key):
        hint = "give KEY or NAME=KEY"
        raise UserError("an API key must be printable ASCII without spaces", hint=hint, param="api_key")
    return tenant, key


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=32).digest()
