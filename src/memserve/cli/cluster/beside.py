"""Servers of other projects behind an HTTP server: its application, and which servers there are, in a file for other
routers. With own models beside them, or without (:mod:`memserve.cli.cluster.fleet`).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from memserve.base.config import ClusterConfig
from memserve.base.errors import UserError
from memserve.base.options import command_line_of
from memserve.cli.credentials import followed_key
from memserve.cli.flags import EnginesBeside, HttpOptions
from memserve.fleet.messages import EngineSpec, FleetOptions, read_engine
from memserve.journal.folder import write_private
from memserve.system.secrets import Followed

if TYPE_CHECKING:
    from memserve.api.app import Application
    from memserve.api.http.limits import Edge
    from memserve.api.model_table import RelayedModels
    from memserve.fleet.app import RelayedFleet
    from memserve.fleet.host import FleetHost, RouterLinks

log = logging.getLogger(__name__)

ENGINES = "engines"
"""Of the engines, in the folder of the metadata: the routers beside the owner read it, whichever owner writes it."""
ADMISSION = "admission"
"""The socket beside it, where routers of engines alone ask the first one for admission."""
ENGINES_FLAG = "--engines-file"


def _fleet_host(
    options: FleetOptions,
    config: ClusterConfig,
    specs: Sequence[EngineSpec],
    listed: Callable[[], Sequence[EngineSpec]] | None = None,
) -> FleetHost:
    """What looks at the engines ``specs``. ``listed``: as of :class:`memserve.fleet.host.FleetHost`."""
    from memserve.fleet.host import FleetHost

    engine_key = key_of(options.key_file)
    tokens, key = options.prefill_tokens, secrets.token_bytes(16)
    return FleetHost(specs, config, identity_key=key, engine_key=engine_key, prefill_tokens=tokens, listed=listed)


def _following_host(options: FleetOptions, config: ClusterConfig, file: Path, router: str) -> FleetHost:
    """What looks at the engines that ``file`` lists, in the router of this name (``NAME-NUMBER``) beside the owner."""
    listed = Followed([file], lambda: _read_engines_file(file), "the engines", tells=False)
    # each router numbers engines in another order: of those that are equally good they choose different ones
    specs, number = listed.value(), router.rpartition("-")[2]
    turn = int(number) % max(1, len(specs)) if number.isdecimal() else 0
    return _fleet_host(options, config, (*specs[turn:], *specs[:turn]), listed.value)


def fleet_app(host: FleetHost, options: FleetOptions, http: HttpOptions, edge: Edge | None = None) -> Application:
    """The application in front of the engines of ``host``. ``edge``: of the server, where it has other applications."""
    from memserve.fleet.app import create_fleet_app

    return create_fleet_app(
        host,
        api_keys=http.api_keys.follow_keys(),
        metrics_keys=http.metrics_keys.follow_keys(),
        engines_key=key_of(options.admin_key_file),
        limits=http.limits,
        silence_s=options.silence_s,
        edge=edge,
    )


def key_of(path: str | None) -> Followed[str] | None:
    """The key in the file; None: there is no file."""
    return None if path is None else followed_key(Path(path))


def _tell_engines(host: FleetHost, file: Path) -> None:
    """Write which engines ``host`` has into ``file``, now and whenever one joins or leaves."""
    _write_engines(file, list(host.specs.values()))
    host.on_engines_changed = partial(_write_engines, file)


def _write_engines(file: Path, specs: Sequence[EngineSpec]) -> None:
    try:
        write_private(file, "".join(f"{spec.text}\n" for spec in specs))
    except OSError as error:
        log.error("the other routers do not hear which engines there are: %s", error)


def write_engines_of(http: HttpOptions) -> None:
    """Write which engines there are at the start, before other routers look."""
    if http.beside is not None and http.beside.file is not None:
        _write_engines(http.beside.file, http.beside.fleet.read_specs())


def _read_engines_file(file: Path) -> tuple[EngineSpec, ...]:
    """What :func:`_tell_engines` has written. Raises :class:`UserError` where the file cannot be read."""
    try:
        return tuple(read_engine(line) for line in file.read_text(encoding="utf-8").splitlines())
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None


@contextmanager
def with_engines_file(http: HttpOptions, folder: Path | None, *, is_shared: bool) -> Iterator[HttpOptions]:
    """``http``, with a place for the file of the engines where other routers need it. ``folder``: of the metadata;
    None: the file goes with this process."""
    if http.beside is None or not is_shared:
        yield http
    elif folder is not None and _is_writable(folder):
        yield dataclasses.replace(http, beside=dataclasses.replace(http.beside, file=folder / ENGINES))
    else:
        with tempfile.TemporaryDirectory(prefix="memserve-engines-") as own_folder:
            yield dataclasses.replace(http, beside=dataclasses.replace(http.beside, file=Path(own_folder) / ENGINES))


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def follower_words(http: HttpOptions) -> tuple[str, ...]:
    """What the command line of a router beside the owner says of the engines; each change of it starts them anew."""
    beside = http.beside
    if beside is None or beside.file is None:
        return ()
    options = dataclasses.replace(beside.fleet, engines=())
    return ENGINES_FLAG, str(beside.file), *command_line_of(options)


def open_beside(http: HttpOptions, edge: Edge) -> RelayedFleet | None:
    """What answers for models of other servers beside own ones. None: there are none. Raises :class:`UserError` for
    keys that cannot be read."""
    beside = http.beside
    if beside is None:
        return None
    from memserve.fleet.app import RelayedFleet, without_admission

    host = host_of(beside, without_admission(beside.config))
    return RelayedFleet(host, fleet_app(host, beside.fleet, http, edge))


def host_of(beside: EnginesBeside, config: ClusterConfig) -> FleetHost:
    """What looks at the engines, by its owner's word or by that of the file, which the owner writes."""
    if beside.file is not None and beside.router:
        host = _following_host(beside.fleet, config, beside.file, beside.router)
        host.owner_url = beside.owner_url
        return host
    host = _fleet_host(beside.fleet, config, beside.fleet.read_specs())
    if beside.file is not None:
        _tell_engines(host, beside.file)
    return host


def links_of(host: FleetHost, beside: EnginesBeside, drain_s: float) -> RouterLinks | None:
    """How the routers of engines alone reach each other, to share an admission. None: there is none, or one router.
    ``drain_s``: seconds that a router takes to end. Raises :class:`UserError` where that cannot be."""
    from memserve.fleet.routers.links import OwnerLine, RouterDesk

    if beside.file is None or not beside.config.admission.shared_mode:
        return None
    path = beside.file.with_name(ADMISSION)
    if beside.router:
        return OwnerLine(path, beside.router, host.post_event)
    desk = RouterDesk(path, host.post_event, drain_s)
    desk.bind_socket()
    return desk


def engine_lines(relayed: RelayedModels | None) -> list[str]:
    """What is said at the start of other servers."""
    if relayed is None:
        return []
    states = relayed.server_states()
    models = ", ".join(relayed.model_names()) or "no model yet"
    return [f"engines: {sum(states.values())} of {len(states)} take requests: {models}"]
