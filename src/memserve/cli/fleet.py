"""``memserve serve --engine``: the router in front of servers of other projects."""

from __future__ import annotations

import logging
import secrets
import time
from pathlib import Path

from memserve.cli.credentials import followed_key
from memserve.cli.options import HttpOptions
from memserve.cli.progress import say
from memserve.config import ClusterConfig
from memserve.errors import UserError
from memserve.fleet.words import FleetOptions
from memserve.runtime.process import EndAsked, on_ending_signals, signals_raise
from memserve.store_options import StoreOptions
from memserve.types import Admission

log = logging.getLogger(__name__)


def refuse_members(config: ClusterConfig, store: StoreOptions | None) -> None:
    """Raise :class:`UserError` for options that do not go together with ``--engine``. ``store`` None: instances are
    asked for as well."""
    if store is None:
        hint = "leave out --in-process, --prefill, --decode, --colocated and --cluster-port, or --engine"
        raise UserError("--engine serves through other servers, and has no instances of its own", hint=hint)
    store.refuse("leave out --engine")
    if config.admission.mode in (Admission.MEMORY, Admission.CACHE):
        hint = "use --admission bounded --max-active N"
        raise UserError("the memory of other servers is not known block by block", hint=hint, param="mode")


def run_fleet(options: FleetOptions, http: HttpOptions, config: ClusterConfig, store: StoreOptions | None) -> None:
    """Bind, look at the engines, serve, drain. Raises :class:`UserError` for wrong options, as
    :func:`refuse_members` does."""
    refuse_members(config, store)
    started = time.perf_counter()
    from memserve.api.edge import make_room_for_connections
    from memserve.api.fleet import create_fleet_app
    from memserve.api.server import Server, bind
    from memserve.runtime.fleet import FleetHost

    engine_key, engines_key = (
        followed_key(Path(path)) if path is not None else None for path in (options.key_file, options.admin_key_file)
    )
    host = FleetHost(
        options.specs(),
        config,
        identity_key=secrets.token_bytes(16),
        engine_key=engine_key,
        prefill_tokens=options.prefill_tokens,
    )
    app = create_fleet_app(
        host,
        api_keys=http.api_keys.follow(),
        metrics_keys=http.metrics_keys.follow(),
        engines_key=engines_key,
        limits=http.limits,
        silence_s=options.silence_s,
    )

    def on_ready() -> None:
        views = host.machine.engines()
        models = ", ".join(host.machine.models()) or "no model yet"
        url = http.url(listener.getsockname()[1])
        up = sum(view.up for view in views)
        ready = f"ready in {time.perf_counter() - started:.1f} s: {models} at {url}"
        say(ready, f"{up} of {len(views)} engines take requests", result=True)

    try:
        with signals_raise(), bind(http.host, http.port) as listener:
            make_room_for_connections(http.limits.connections_max)
            server = Server(app, drain_s=http.drain_s, log_level=http.log_level, tls=http.tls, on_ready=on_ready)
            on_ending_signals(server.handle_exit)
            server.run(sockets=[listener])
    except EndAsked as asked:
        log.warning("%s: stopped before it was ready", asked.signal_name)
