"""Secrets that an operator gives: API keys, the cluster's secret, credentials for etcd.

A secret belongs in a file or in an environment variable: every user of the machine can read command lines. What comes
from the environment is taken out of it, so that no child process (instances, the conversion of a GGUF file) inherits
it. No error here repeats a secret.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Annotated

import typer

from memserve.errors import UserError
from memserve.runtime.meta_etcd import EtcdAccess
from memserve.units import MIB

log = logging.getLogger(__name__)

ETCD_USER_VARIABLE, ETCD_PASSWORD_VARIABLE = "MEMSERVE_ETCD_USER", "MEMSERVE_ETCD_PASSWORD"
KEY_VARIABLE, KEY_FILE_VARIABLE = "MEMSERVE_API_KEY", "MEMSERVE_API_KEY_FILE"
METRICS_VARIABLE = "MEMSERVE_METRICS_KEY"
ETCD_SETTINGS = ("ca", "cert", "key", "user", "password")

ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        help="KEY, or NAME=KEY for a tenant of its own; repeatable. Every user of this machine can read it in the"
        f" process list: rather use --api-key-file, or {KEY_VARIABLE}."
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="File with one API key a line, KEY or NAME=KEY; empty lines and lines that begin with # are skipped."
        f" Also {KEY_FILE_VARIABLE}."
    ),
]
MetricsKey = Annotated[
    str | None,
    typer.Option(
        help="GET /metrics asks for this key, and then names tenants by the names of their API keys. Rather use"
        f" {METRICS_VARIABLE}: every user of this machine can read the process list."
    ),
]
MetadataCredentials = Annotated[
    Path | None,
    typer.Option(
        help="File with what etcd asks for, NAME = VALUE a line: ca, cert, key (paths of PEM files), user, password.",
        envvar="MEMSERVE_METADATA_CREDENTIALS",
    ),
]
ClusterSecretFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the secret that all members of the cluster share.", envvar="MEMSERVE_CLUSTER_SECRET_FILE"
    ),
]


def api_keys(given: list[str] | None, file: Path | None) -> tuple[str, ...]:
    """Keys of the command line (else of ``MEMSERVE_API_KEY``) and of the file, added up. Empty: no key is asked for.

    Raises :class:`UserError` for a file or a variable that holds no key: a server must not be open because a variable
    was empty.
    """
    variable, file_variable = os.environ.pop(KEY_VARIABLE, None), os.environ.pop(KEY_FILE_VARIABLE, None)
    for name, value in ((KEY_VARIABLE, variable), (KEY_FILE_VARIABLE, file_variable)):
        if value is not None and not value.strip():
            raise UserError(f"{name} is empty", hint=f"put a key there, or `unset {name}` to serve without keys")
    if given:
        log.warning("--api-key can be read in the process list by every user of this machine: use --api-key-file")
    keys = list(given or (variable or "").split())
    path = file or (Path(file_variable) if file_variable is not None else None)
    return tuple(keys + (_keys_in(path) if path is not None else []))


def metrics_key(given: str | None) -> str | None:
    """The key of ``/metrics``, of the command line or else of the environment. None: ``/metrics`` is open.

    Raises :class:`UserError` for an empty one.
    """
    variable = os.environ.pop(METRICS_VARIABLE, None)
    for name, value in (("--metrics-key", given), (METRICS_VARIABLE, variable)):
        if value is not None and not value.strip():
            raise UserError(f"{name} is empty", hint="put a key there, or leave it out: /metrics is open then")
    return given or variable


def secret_of(port: int | None, path: Path | None) -> str | None:
    """The cluster's secret, for a router that others may join."""
    return read_secret(path) if port and path is not None else None


def read_secret(path: Path) -> str:
    """The cluster's secret. Raises :class:`UserError` when the file cannot be read, or is no text."""
    hint = f"make one: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
    return _read_private(path, "the cluster secret", hint).strip()


def etcd_access(path: Path | None) -> EtcdAccess | None:
    """TLS and the user for etcd, from ``--metadata-credentials`` and, for the user, else from the environment. None:
    nothing was given.

    A ``ca`` asks for TLS: the path of certificates in PEM, or ``system`` for those that the system trusts. Raises
    :class:`UserError` for a file that cannot be read or understood.
    """
    user, password = (os.environ.pop(name, "") for name in (ETCD_USER_VARIABLE, ETCD_PASSWORD_VARIABLE))
    found = _settings_in(path) if path is not None else {}
    user, password = found.pop("user", user), found.pop("password", password)
    hint = f"`user` and `password` in the file, or {ETCD_USER_VARIABLE} and {ETCD_PASSWORD_VARIABLE}"
    if bool(user) != bool(password):
        raise UserError("etcd wants a user and a password", hint=hint, param="metadata_credentials")
    if ("cert" in found) != ("key" in found) or (found and "ca" not in found):
        hint = "`ca = PATH` or `ca = system`; beside it both of `cert` and `key`, or neither"
        raise UserError(f"{path} has no ca, or half a client certificate", hint=hint, param="metadata_credentials")
    ca, cert, key = (found.get(name) for name in ("ca", "cert", "key"))
    if not ca and not user:
        return None
    if not ca:
        log.warning(
            "the password for etcd goes over the network in plain text: name a `ca`, and etcd is spoken to in TLS"
        )
    hint = "give the path of a PEM file"
    return EtcdAccess(
        tls=ca is not None,
        ca=None if ca in (None, "system") else _read_private(Path(ca or ""), "etcd's CA", hint, 0).encode(),
        certificate=None if cert is None else _read_private(Path(cert), "the certificate for etcd", hint, 0).encode(),
        key=None if key is None else _read_private(Path(key), "the key for etcd", hint).encode(),
        user=user,
        password=password,
    )


def _settings_in(path: Path) -> dict[str, str]:
    """Raises :class:`UserError` naming the line that is no setting."""
    hint = f"NAME = VALUE a line, NAME one of {', '.join(ETCD_SETTINGS)}; `chmod 600` it"
    found: dict[str, str] = {}
    for number, line in enumerate(_read_private(path, "credentials for etcd", hint).splitlines(), 1):
        name, equals, value = (part.strip() for part in line.partition("="))
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if name not in ETCD_SETTINGS or not equals or not value or name in found:
            raise UserError(f"line {number} of {path} is no setting for etcd", hint=hint, param="metadata_credentials")
        found[name] = value
    return found


def _keys_in(path: Path) -> list[str]:
    """Raises :class:`UserError` naming the line that is no key."""
    hint = "one KEY or NAME=KEY a line; `chmod 600` it"
    keys = []
    for number, line in enumerate(_read_private(path, "API keys", hint).splitlines(), 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if len(key.split()) > 1:
            raise UserError(f"line {number} of {path} is no API key: it has a space in it", hint=hint)
        keys.append(key)
    if not keys:
        raise UserError(f"{path} holds no API key", hint=hint)
    return keys


def _read_private(path: Path, what: str, hint: str, secret_bits: int = 0o044) -> str:
    """The text of a small file. Others may not write to it: they could add a key of their own. ``secret_bits`` 0: what
    is in it may be read by all.

    A file that others may read is only warned of: containers mount secrets with mode 0444 on a read-only file system,
    where there is no other user and the mode cannot be changed.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(MIB + 1)
        if len(data) > MIB:
            raise UserError(f"cannot read {what} in {path}: it is larger than 1 MiB", hint=hint)
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"cannot read {what} in {path}: it is no text", hint=hint) from None
    except OSError as error:
        raise UserError(f"cannot read {what} in {path}: {error.strerror or error}", hint=hint) from None
    if stat.S_ISREG(status.st_mode) and status.st_mode & 0o022:
        raise UserError(f"other users may write to {path}, which holds {what}", hint=f"chmod 600 {path}")
    if stat.S_ISREG(status.st_mode) and status.st_mode & secret_bits:
        log.warning("other users may read %s, which holds %s: chmod 600 %s", path, what, path)
    return text
