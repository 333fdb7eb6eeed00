"""API keys, and the tenants they stand for (level 4, row X5)."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence

from memserve.api.errors import unauthorized
from memserve.errors import UserError

_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})=(.*[^=].*)")


class KeyRing:
    """Knows which key belongs to which tenant. Tenants never share KV."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        """``keys`` as given on the command line: ``KEY``, or ``NAME=KEY`` for a tenant of its own."""
        self._tenants: list[tuple[bytes, str]] = []
        for text in keys:
            named = _NAMED.fullmatch(text)
            tenant, key = named.groups() if named else ("", text)
            if not key or not key.isascii() or any(char.isspace() for char in key):
                raise UserError(
                    "an API key must be printable ASCII without spaces",
                    hint="give --api-key KEY or --api-key NAME=KEY",
                    param="api_key",
                )
            if any(hmac.compare_digest(known, key.encode()) for known, _ in self._tenants):
                raise UserError(
                    "the same API key is given twice", hint="one key belongs to one tenant", param="api_key"
                )
            self._tenants.append((key.encode(), tenant))

    @property
    def is_open(self) -> bool:
        """No key is asked for."""
        return not self._tenants

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an ``Authorization`` header. Raises :class:`ApiError` 401.

        Every key is compared, each in constant time: how long it takes tells nothing about a key.
        """
        if self.is_open:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        key = given.strip().encode("utf-8", "surrogateescape")
        found = [tenant for known, tenant in self._tenants if hmac.compare_digest(known, key)]
        if scheme.lower() != "bearer" or not found:
            raise unauthorized()
        return found[0]
