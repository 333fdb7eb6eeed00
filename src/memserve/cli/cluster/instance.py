"""``memserve instance``: one member of a cluster, on this host or another.

A command as a child of ``memserve serve``: what it is told at the start, and how it tells its last error.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memserve.base.config import DRAIN_S, EngineOptions
from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.cli import credentials
from memserve.cli import flags as opt
from memserve.cli.cluster.models import split_model
from memserve.cli.credentials import followed_key
from memserve.cli.output import print_lines, progress_bar
from memserve.fleet.messages import EngineSpec, read_engine
from memserve.system.process import die_with, ignore_terminal
from memserve.system.secrets import Followed, Secret, follow_secret
from memserve.transport.network_devices import address_towards, join_addresses, own_address, split_address

if TYPE_CHECKING:
    from memserve.transport.member_place import MemberPlace


@dataclass(frozen=True, slots=True)
class Child:
    """What the parent has said."""

    secret: Secret
    host: str
    """The router's, which is this one."""
    outlive: Path | None
    """The parent's state folder, by which the next router finds this process. None: it dies with its parent."""
    startup_payload: Mapping[str, Any]
    """All of it."""


@contextmanager
def child_of_serve(join: str, name: str, log_level: str) -> Iterator[Child]:
    """The secret comes through stdin; a :class:`UserError` inside goes to stdout, and ends the process."""
    error_output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of a library must not be taken for that error
    line = sys.stdin.readline()
    if not line:
        raise typer.Exit(1)  # the parent has ended: nothing reads a last error
    payload = json.loads(line)
    try:
        ignore_terminal()
        outlive = Path(payload["folder"]) if "folder" in payload else None
        if outlive is None:
            die_with(payload["parent_pid"])
        opt.set_up_logging(log_level, name)
        host, _ = split_address(join, "--join")
        yield Child(_secret(payload), host, outlive, payload)
    except UserError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}), file=error_output, flush=True)
        raise typer.Exit(1) from None


def _secret(payload: Mapping[str, Any]) -> Secret:
    """Where the parent has it from a file, the child follows that."""
    file = payload.get("secret_file")
    return follow_secret(Path(file)) if file else str(payload["secret"])


log = logging.getLogger(__name__)

SECRET_HINT = "use the same file as `memserve serve --cluster-secret-file`"


@opt.grouped
def instance(
    *,
    join: Annotated[
        str,
        typer.Option(
            help="HOST:PORT of the router, as opened by `memserve serve --cluster-port`. With standby routers: all of"
            " them, separated by commas; they are tried in turn."
        ),
    ],
    role: Annotated[Role, typer.Option(help="Role of the instance.")] = Role.COLOCATED,
    name: Annotated[
        str | None, typer.Option(help="Name of the instance, unique in the cluster. Default: role, host and process.")
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT by which other hosts reach the instance. Default: the address that reaches the router."
        ),
    ] = None,
    cluster_secret_file: credentials.ClusterSecretFile = None,
    link: opt.Link = opt.DEFAULT_LINK,
    server: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help="Stand for this server of another project, as in `memserve serve --engine`: it runs the model.",
        ),
    ] = None,
    engine_key_file: Annotated[Path | None, typer.Option(help="File with the API key of that server.")] = None,
    engine: EngineOptions,
    drain_s: opt.DrainS = DRAIN_S,
    health_file: opt.HealthFile = None,
    log_level: opt.LogLevel = opt.DEFAULT_LOG_LEVEL,
    supervised: Annotated[bool, typer.Option(hidden=True, help="Run as a child of `memserve serve`.")] = False,
) -> None:
    """Run one instance of a cluster: it joins a router, serves it, and leaves on SIGTERM, SIGHUP or Ctrl-C."""
    model, path = split_model(engine.model)
    engine = dataclasses.replace(engine, model=path)
    role, represented = _read_server(role, server, engine_key_file)
    if supervised:
        _run_supervised(engine, model, join, role, name or role.value, link, log_level, represented)
        return
    opt.set_up_logging(log_level)
    opt.check_name(name or "")
    place = _place(model, join, role, name, advertise, cluster_secret_file, link, drain_s, health_file)
    if represented is not None:
        _represent_engine(represented, engine, place)
        return
    _run_here(engine, place)


def _run_supervised(
    engine: EngineOptions,
    model: str,
    join: str,
    role: Role,
    name: str,
    link: str,
    log_level: str,
    represented: _Represented | None,
) -> None:
    """Run as a child of ``memserve serve``: the secret comes through stdin, a final error goes to stdout."""
    with child_of_serve(join, name, log_level) as child:
        from memserve.transport.member_place import MemberPlace

        place = MemberPlace(
            name=name, role=role, join=(join,), secret=child.secret, host=child.host, link=link,
            drain_s=child.startup_payload.get("drain_s", 0.0), is_supervised=True, outlive=child.outlive, model=model,
        )  # fmt: skip
        if represented is not None:
            _represent_engine(represented, engine, place)
        else:
            from memserve.host.instance import run_instance

            run_instance(engine, place, lambda: None)
        _exit_immediately()


def _run_here(engine: EngineOptions, place: MemberPlace) -> None:
    """Load the model, be a member, end the process."""
    started = time.perf_counter()
    print_lines(f"loading {engine.model} ...")
    from memserve.host.instance import run_instance

    with ExitStack() as loading:
        loading.enter_context(progress_bar("loading"))

        def ready() -> None:
            loading.close()
            _print_ready(place, started)

        run_instance(engine, place, ready, say=print_lines)
    _exit_immediately()


@dataclass(frozen=True, slots=True)
class _Represented:
    """A server of another project, for which this process is a member."""

    spec: EngineSpec
    key_file: Path | None


def _read_server(role: Role, server: str | None, key_file: Path | None) -> tuple[Role, _Represented | None]:
    """The role of the member, and the server that it represents, if any."""
    if server is not None:
        return Role.ENGINE, _Represented(read_engine(server), key_file)
    if role is Role.ENGINE:
        raise UserError("a member of role engine is for a server", hint="name it: --engine vllm=http://HOST:PORT")
    return role, None


def _represent_engine(server: _Represented, engine: EngineOptions, place: MemberPlace) -> None:
    """Be a member for ``server``, with the tokenizer of the model that ``engine`` names."""
    import asyncio

    from memserve.fleet.members.host import EngineMemberOptions, EngineProcess
    from memserve.model.loading.card import early_tokenizer
    from memserve.model.loading.sources import resolve_source

    folder = resolve_source(engine.model, "float32", keep_file=engine.may_keep_file)
    tokenizer = early_tokenizer(folder)
    if tokenizer is None:
        from memserve.model.loading.loader import load_tokenizer  # by the model's config, which needs torch

        tokenizer = load_tokenizer(folder)
    key = Followed[str | None].of_constant(None) if server.key_file is None else followed_key(server.key_file)
    options = EngineMemberOptions(
        server.spec, lambda text: list(tokenizer.encode(text, add_special_tokens=False)), engine.block_tokens, place
    )
    member = EngineProcess(options, key, print_lines if not place.is_supervised else log.warning)
    place.end_when_orphaned(lambda: member.router)
    asyncio.run(member.run())


def _exit_immediately() -> None:
    """End without destroying torch's and transformers' objects, which would take seconds and free nothing."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def _place(
    model: str,
    join: str,
    role: Role,
    name: str | None,
    advertise: str | None,
    secret_file: Path | None,
    link: str,
    drain_s: float,
    health_file: Path | None,
) -> MemberPlace:
    from memserve.transport.member_place import MemberPlace

    if secret_file is None:
        raise UserError("an instance needs the cluster's secret: --cluster-secret-file", hint=SECRET_HINT)
    own_host, port = split_address(advertise, "--advertise") if advertise else (own_host_to(join), 0)
    return MemberPlace(
        role=role,
        name=name or f"{role.value}-{socket.gethostname()}-{os.getpid()}",
        join=join_addresses(join),
        secret=follow_secret(secret_file),
        drain_s=drain_s,
        host=listen_host(own_host),
        port=port,
        advertise=own_host,
        link=link,
        health_file=health_file,
        model=model,
    )


def listen_host(advertised: str) -> str:
    """Where to listen: at the advertised address if it is this host's; else (behind NAT) at all addresses."""
    return own_address(advertised) or ("::" if ":" in advertised else "0.0.0.0")


def own_host_to(join: str) -> str:
    """The address of this host on the way to the first router of ``join``, found without sending anything."""
    router_host, _ = split_address(join.split(",")[0], "--join")
    try:
        return address_towards(router_host)
    except OSError as error:
        hint = "check --join, or name this host with --advertise HOST:PORT"
        raise UserError(f"there is no route to {router_host}: {error.strerror or error}", hint=hint) from None


def _print_ready(place: MemberPlace, started: float) -> None:
    seconds = time.perf_counter() - started
    print_lines(
        f"ready in {seconds:.1f} s: {place.name} ({place.role.value}) is a member of {', '.join(place.join)}",
        result=True,
    )
