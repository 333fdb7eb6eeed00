"""The cluster's secret beside a store's disks.

What lies there is found by identities that are keyed with the secret: with another one nothing is found again. So the
first folder of ``--ssd`` has a copy, for its owner alone, from which a server goes on that has no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from memserve.errors import UserError
from memserve.mempool.identity import kv_secret
from memserve.runtime.meta_folder import write_private
from memserve.store_options import StoreOptions

SECRET = "memserve-store.secret"


def with_absolute_folders(store: StoreOptions) -> StoreOptions:
    """``store`` with paths that mean the same to every process. Raises :class:`UserError` for a folder named twice."""
    folders = {str(Path(folder).expanduser().resolve()): size for folder, size in store.folders}
    if len(folders) < len(store.folders):
        raise UserError("--ssd names one folder twice", hint="one folder a disk", param="ssd")
    return replace(store, folders=tuple(folders.items()))


def stored_secret(store: StoreOptions) -> str | None:
    """The secret with which the disks were written. None: there is none. Raises :class:`UserError` when it cannot be
    read."""
    path = _path_of(store)
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        hint = f"restore it, or remove it: what {path.parent} holds is then not found any more"
        raise UserError(f"cannot read the cluster secret in {path}: {reason}", hint=hint, param="ssd") from None


def store_secret(store: StoreOptions, secret: str, say: Callable[[str], None]) -> None:
    """Keep ``secret`` beside the disks, unless there is one. Raises :class:`UserError` when it cannot be written."""
    path, known = _path_of(store), stored_secret(store)
    if path is None or known == secret:
        return
    if known is not None and kv_secret(known) != kv_secret(secret):
        say(f"{path} is of another cluster: what was kept in {path.parent} under it is not found (is --metadata new?)")
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, secret + "\n")
    except OSError as error:
        hint = "give a folder that this user may write to: --ssd DIR=20GiB"
        message = f"cannot keep a store in {path.parent}: {error.strerror}"
        raise UserError(message, hint=hint, param="ssd") from None


def _path_of(store: StoreOptions) -> Path | None:
    return Path(store.folders[0][0]) / SECRET if store.folders else None
