"""Files with secrets: read whole, and refused where other users could have written them."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from memserve.errors import UserError
from memserve.units import MIB

log = logging.getLogger(__name__)

SECRET_FILE_VARIABLE = "MEMSERVE_CLUSTER_SECRET_FILE"


def read_secret(path: Path, what: str = "the cluster secret") -> str:
    """A secret that fills a file. Raises :class:`UserError` when the file cannot be read, or is no text."""
    hint = f"make one: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
    return read_private(path, what, hint).strip()


def read_private(path: Path, what: str, hint: str, secret_bits: int = 0o044) -> str:
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
        raise UserError(f"cannot read {what} in {path}: it is not text", hint=hint) from None
    except OSError as error:
        raise UserError(f"cannot read {what} in {path}: {error.strerror or error}", hint=hint) from None
    if stat.S_ISREG(status.st_mode) and status.st_mode & 0o022:
        raise UserError(f"other users may write to {path}, which holds {what}", hint=f"chmod 600 {path}")
    if stat.S_ISREG(status.st_mode) and status.st_mode & secret_bits:
        log.warning("other users may read %s, which holds %s: chmod 600 %s", path, what, path)
    return text
