"""What callers give to a client: keys, buffers, addresses and secrets, each with one clear error."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from memserve.base.errors import UserError
from memserve.journal.folder import SECRET, default_folder
from memserve.protocol.store import NAME_BYTES_MAX
from memserve.store.host.files import SECRET as STORE_SECRET
from memserve.system.secrets import SECRET_FILE_VARIABLE, Followed, follow_secret
from memserve.transport.network_devices import address_towards, own_address, with_port

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FOUND_MAX = 4


def checked_key(key: bytes) -> bytes:
    """``key``, if it is one. Raises :class:`UserError` for what is no ``bytes``, empty or too long."""
    if type(key) is not bytes:
        raise UserError(f"a key is bytes, got {type(key).__name__}", hint="text: key.encode()", param="key")
    if not 1 <= len(key) <= NAME_BYTES_MAX:
        message = f"a key has 1 to {NAME_BYTES_MAX} bytes, this one {len(key)}"
        raise UserError(message, hint="take a digest of a longer one, of 16 bytes or more", param="key")
    return key


def checked_keys(keys: Iterable[bytes]) -> list[bytes]:
    """A list of keys. Raises :class:`UserError` as :func:`checked_key`; one ``bytes`` is no list of keys."""
    if isinstance(keys, (bytes, bytearray, str)):
        raise UserError("keys are a list of bytes, got one", hint="[key]", param="keys")
    listed = list(keys)
    kinds, lengths = set(map(type, listed)), set[int]()
    if kinds == {bytes}:
        lengths = set(map(len, listed))
    if listed and not (lengths and min(lengths) >= 1 and max(lengths) <= NAME_BYTES_MAX):
        return [checked_key(key) for key in listed]
    return listed


def readable(value: Buffer) -> memoryview:
    """The bytes of a contiguous buffer, one behind the other. Raises :class:`UserError` for anything else."""
    try:
        view = memoryview(value)
    except TypeError:
        hint = "bytes, a bytearray, a memoryview or an array of numpy (torch: tensor.numpy())"
        raise UserError(f"a value is a buffer, got {type(value).__name__}", hint=hint, param="value") from None
    if not view.c_contiguous:
        raise UserError("a value is one contiguous run of bytes", hint="numpy.ascontiguousarray(value)", param="value")
    return view.cast("B") if view.nbytes else memoryview(b"")


def writable(buffer: Buffer) -> memoryview:
    """The bytes of a contiguous buffer that can be written to. Raises :class:`UserError` for anything else."""
    view = readable(buffer)
    if view.nbytes and view.readonly:
        raise UserError("this buffer cannot be written to", hint="a bytearray, or numpy.empty(n, numpy.uint8)")
    return view


def checked_address(address: str) -> str:
    """``HOST:PORT`` of ``HOST:PORT`` or ``tcp://HOST:PORT``. Raises :class:`UserError`."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        hint = "HOST:PORT, as `memserve store --listen` has it"
        raise UserError(f"{address[:100]!r} is no address of a store", hint=hint, param="address")
    return with_port(host.strip("[]"), port)


def own_host(address: str) -> str:
    """The address of this host that a store at ``address`` can answer to; nothing is sent to find it."""
    host = address.rpartition(":")[0].strip("[]")
    local_address = own_address(host)
    if local_address is not None:
        return local_address
    try:
        return address_towards(host)
    except OSError as error:
        hint = "correct the address, or name this host: listen=HOST"
        raise UserError(f"there is no way to {host}: {error.strerror or error}", hint=hint, param="address") from None


def secret_in(secret_file: str | os.PathLike[str] | None) -> Followed[str]:
    """The cluster's secret. None: the file that ``MEMSERVE_CLUSTER_SECRET_FILE`` names.

    Raises :class:`UserError` when there is none; it says where servers of this user keep theirs.
    """
    secret_path = secret_file if secret_file is not None else os.environ.get(SECRET_FILE_VARIABLE)
    if secret_path:
        return follow_secret(Path(secret_path))
    hint = f"secret_file=PATH, or {SECRET_FILE_VARIABLE}=PATH: the file that the store was given, or {STORE_SECRET} in"
    hint += " its first --ssd folder"
    if secret_files := _stored_secrets():
        hint = f"secret_file=PATH; servers of this user keep theirs in {', '.join(map(str, secret_files))}"
    raise UserError("a store speaks only to clients that know the cluster's secret", hint=hint, param="secret_file")


def _stored_secrets() -> list[Path]:
    """Files with secrets that were made because none was given, the newest first."""
    try:
        secret_files = list(default_folder(0).parent.glob(f"*/{SECRET}"))
        return sorted(secret_files, key=lambda path: path.stat().st_mtime, reverse=True)[:_FOUND_MAX]
    except OSError:
        return []
