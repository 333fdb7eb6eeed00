"""Secrets that an operator gives: API keys, the cluster's secret, credentials for etcd.

A secret belongs in a file or in an environment variable: every user of the machine can read command lines. Secrets in
the environment are removed from it, so that no child process (instances, the conversion of a GGUF file) inherits them.
No error here repeats a secret.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memserve.base.errors import UserError
from memserve.base.options import MANY, option
from memserve.journal.etcd import EtcdAccess
from memserve.system.secrets import Followed, GivenKeys, follow_secret, read_private
from memserve.system.secrets import read_secret as read_secret

if TYPE_CHECKING:
    from memserve.api.http.tls import Tls

log = logging.getLogger(__name__)

ETCD_USER_VARIABLE, ETCD_PASSWORD_VARIABLE = "MEMSERVE_ETCD_USER", "MEMSERVE_ETCD_PASSWORD"
KEY_VARIABLE, KEY_FILE_VARIABLE = "MEMSERVE_API_KEY", "MEMSERVE_API_KEY_FILE"
METRICS_VARIABLE = "MEMSERVE_METRICS_KEY"
ETCD_SETTINGS = ("ca", "cert", "key", "user", "password")

MetadataCredentials = Annotated[
    Path | None,
    typer.Option(
        help="File with credentials for etcd, one NAME = VALUE per line: ca, cert, key (PEM files), user, password.",
        envvar="MEMSERVE_METADATA_CREDENTIALS",
    ),
]
ClusterSecretFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the secret that all members of the cluster share. Read again when changed.",
        envvar="MEMSERVE_CLUSTER_SECRET_FILE",
    ),
]
StoreSecretFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster-secret-file",
        "--secret-file",
        help="File with the secret that all members of the cluster share. Read again when changed.",
        envvar="MEMSERVE_CLUSTER_SECRET_FILE",
    ),
]


@dataclass(frozen=True, slots=True, repr=False)
class KeyOptions:
    """Keys and certificate of an HTTP server."""

    api_key: tuple[str, ...] = option((), form=MANY)
    """KEY, or NAME=KEY for a tenant of its own; repeatable. Every user of this machine can read it in the process list:
    prefer --api-key-file, or MEMSERVE_API_KEY."""
    api_key_file: Path | None = option(None)
    """File with one API key per line, KEY or NAME=KEY; empty lines and lines that begin with # are skipped. Read again
    when changed. Also MEMSERVE_API_KEY_FILE."""
    metrics_key: str | None = option(None)
    """GET /metrics requires this key, and then names tenants by the names of their API keys. Prefer
    MEMSERVE_METRICS_KEY or --metrics-key-file: every user of this machine can read the process list."""
    metrics_key_file: Path | None = option(None)
    """File with keys of GET /metrics, one per line. Read again when changed."""
    tls_cert: Path | None = option(None)
    """Serve HTTPS: file with the certificate in PEM, with the chain behind it. Read again when changed."""
    tls_key: Path | None = option(None)
    """File with the certificate's key in PEM, without a passphrase."""

    def read_tls(self) -> Tls | None:
        """What HTTP is encrypted with. Raises as :func:`tls_of`."""
        return tls_of(self.tls_cert, self.tls_key)

    def read_keys(self) -> tuple[GivenKeys, GivenKeys]:
        """Those of the API, and of ``/metrics``. Raises as :func:`api_keys` and :func:`metrics_keys`."""
        own_keys = api_keys(list(self.api_key), self.api_key_file)
        return own_keys, metrics_keys(self.metrics_key, self.metrics_key_file)


def tls_of(cert: Path | None, key: Path | None) -> Tls | None:
    """What HTTP is encrypted with. None: it is not. Raises :class:`UserError` for half a pair, and for files that are
    none."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise UserError(
            "TLS needs a certificate and its key", hint="give both --tls-cert and --tls-key", param="tls_cert"
        )
    from memserve.api.http.tls import Tls  # not before: it loads the server

    return Tls(cert, key)


def api_keys(option_keys: list[str] | None, file: Path | None) -> GivenKeys:
    """Keys of the command line (else of ``MEMSERVE_API_KEY``), then those of the file. Neither: no key is required.

    Raises :class:`UserError` for a file or a variable that holds no key: a server must not be open because a variable
    was empty.
    """
    variable, file_variable = os.environ.pop(KEY_VARIABLE, None), os.environ.pop(KEY_FILE_VARIABLE, None)
    for name, value in ((KEY_VARIABLE, variable), (KEY_FILE_VARIABLE, file_variable)):
        if value is not None and not value.strip():
            raise UserError(f"{name} is empty", hint=f"put a key there, or `unset {name}` to serve without keys")
    if option_keys:
        log.warning("--api-key can be read in the process list by every user of this machine: use --api-key-file")
    words = tuple(option_keys or (variable or "").split())
    return _checked(GivenKeys(words, file or (Path(file_variable) if file_variable is not None else None)))


def metrics_keys(option_key: str | None, file: Path | None = None) -> GivenKeys:
    """Keys of ``/metrics``: from the command line, else from the environment, and those of the file. Neither:
    ``/metrics`` is open.

    Raises :class:`UserError` for an empty key, and for a file that holds none.
    """
    variable = os.environ.pop(METRICS_VARIABLE, None)
    for name, value in (("--metrics-key", option_key), (METRICS_VARIABLE, variable)):
        if value is not None and not value.strip():
            raise UserError(f"{name} is empty", hint="put a key there, or leave it out: /metrics is open then")
    word = option_key or variable
    return _checked(GivenKeys(() if word is None else (word,), file))


def _checked(keys: GivenKeys) -> GivenKeys:
    words = keys.read_keys()
    is_pipe = keys.file is not None and not keys.file.is_file()  # it can be read once
    return GivenKeys(words) if is_pipe else keys


def followed_key(path: Path) -> Followed[str]:
    """The one key that fills a file. Raises :class:`UserError` for a file without one."""

    def read() -> str:
        key = read_secret(path, "a key")
        if not key or len(key.split()) > 1:
            raise UserError(f"{path} does not hold one key", hint="put a key there, and nothing else")
        return key

    return Followed([path] if path.is_file() else [], read, "the key")


def secret_of(path: Path | None, *, is_needed: bool) -> Followed[str] | None:
    """The cluster's secret, for a router that has members which it does not start. None: it has none, or no file."""
    return follow_secret(path) if is_needed and path is not None else None


def etcd_access(path: Path | None) -> EtcdAccess | None:
    """TLS and user for etcd from ``--metadata-credentials``; the user also from the environment. None: neither is set.

    ``ca`` turns TLS on: a path of certificates in PEM, or ``system`` for those that the system trusts. Raises
    :class:`UserError` for a file that cannot be read or is malformed.
    """
    user, password = (os.environ.pop(name, "") for name in (ETCD_USER_VARIABLE, ETCD_PASSWORD_VARIABLE))
    settings = _settings_in(path) if path is not None else {}
    user, password = settings.pop("user", user), settings.pop("password", password)
    hint = f"`user` and `password` in the file, or {ETCD_USER_VARIABLE} and {ETCD_PASSWORD_VARIABLE}"
    if bool(user) != bool(password):
        raise UserError("etcd needs both a user and a password", hint=hint, param="metadata_credentials")
    if ("cert" in settings) != ("key" in settings) or (settings and "ca" not in settings):
        hint = "`ca = PATH` or `ca = system`; beside it both of `cert` and `key`, or neither"
        raise UserError(f"{path} has no ca, or half a client certificate", hint=hint, param="metadata_credentials")
    ca, cert, key = (settings.get(name) for name in ("ca", "cert", "key"))
    if not ca and not user:
        return None
    if not ca:
        log.warning("the password for etcd goes over the network in plain text: set `ca` to turn TLS on")
    hint = "give the path of a PEM file"
    return EtcdAccess(
        tls=ca is not None,
        ca=None if ca in (None, "system") else read_private(Path(ca or ""), "etcd's CA", hint, 0).encode(),
        certificate=None if cert is None else read_private(Path(cert), "the certificate for etcd", hint, 0).encode(),
        key=None if key is None else read_private(Path(key), "the key for etcd", hint).encode(),
        user=user,
        password=password,
    )


def _settings_in(path: Path) -> dict[str, str]:
    """The settings in a file. Raises :class:`UserError` naming a line that is not a setting."""
    hint = f"one NAME = VALUE per line, NAME one of {', '.join(ETCD_SETTINGS)}; `chmod 600` it"
    settings: dict[str, str] = {}
    for number, line in enumerate(read_private(path, "credentials for etcd", hint).splitlines(), 1):
        name, equals, value = (part.strip() for part in line.partition("="))
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if name not in ETCD_SETTINGS or not equals or not value or name in settings:
            message = f"line {number} of {path} is not a setting for etcd"
            raise UserError(message, hint=hint, param="metadata_credentials")
        settings[name] = value
    return settings
