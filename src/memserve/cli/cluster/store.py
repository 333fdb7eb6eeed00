"""``memserve store``: keeps KV blocks and values of clients in memory and on disks.

``memserve store stat|ls|verify|purge``: what a store holds, whether it is whole, and how to empty it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from memserve.base.deployment import StoreOptions, read_folders
from memserve.base.errors import UserError
from memserve.base.types import KV_CODECS, check_kv_codec
from memserve.base.units import human_bytes, parse_bytes
from memserve.cli import credentials
from memserve.cli import flags as opt
from memserve.cli.cluster.instance import child_of_serve, listen_host, own_host_to
from memserve.cli.credentials import StoreSecretFile
from memserve.cli.output import print_lines
from memserve.store.host.files import store_secret, stored_secret, with_absolute_folders
from memserve.system.secrets import Secret, as_followed, follow_secret
from memserve.transport.network_devices import join_addresses, split_address

if TYPE_CHECKING:
    from memserve.protocol.store import StoreEntry
    from memserve.store.client.client import StoreClient
    from memserve.store.disks.events import Admission, DisksConfig, Sync
    from memserve.store.host.process import StorePlace, StoreRun


_LOOK_S = 0.2
_PLACES = {1: "memory", 2: "disk", 3: "memory and disk"}

Address = Annotated[str, typer.Argument(help="HOST:PORT of the store, as `memserve store --listen` has it.")]
Tenant = Annotated[str, typer.Option(help="Whose values.")]
Everything = Annotated[bool, typer.Option("--all", help="Of all tenants, and the KV blocks, too.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TimeoutS = Annotated[float, typer.Option(min=0.001, help="Seconds that each answer of the store may take.")]
DEFAULT_TENANT, DEFAULT_TIMEOUT_S = "default", 5.0


def add_tools(app: typer.Typer) -> None:
    """Add the commands to ``memserve store``."""
    for command in (stat, ls, verify, purge):
        app.command()(command)


def stat(
    address: Address,
    *,
    cluster_secret_file: StoreSecretFile = None,
    as_json: AsJson = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
) -> None:
    """Print sizes and totals of a store."""
    with _client(address, DEFAULT_TENANT, cluster_secret_file, timeout_s) as client:
        _print_numbers(client.statistics(timeout_s=timeout_s), as_json)


def ls(
    address: Address,
    *,
    tenant: Tenant = DEFAULT_TENANT,
    everything: Everything = False,
    limit: Annotated[int, typer.Option(min=0, help="Most lines; 0: all.")] = 1000,
    cluster_secret_file: StoreSecretFile = None,
    as_json: AsJson = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
) -> None:
    """List values: bytes, where they lie, and their keys. In no order."""
    with _client(address, tenant, cluster_secret_file, timeout_s) as client:
        entries = client.entries(everything=everything, timeout_s=timeout_s)
        for entry in itertools.islice(entries, limit or None):
            typer.echo(json.dumps(_described(entry)) if as_json else _entry_line(entry))
        if limit and next(entries, None) is not None:
            typer.echo(f"there are more than {limit:,}: --limit 0 lists them all", err=True)


def verify(
    address: Address,
    *,
    cluster_secret_file: StoreSecretFile = None,
    as_json: AsJson = False,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
) -> None:
    """Have a store read and compare everything that it keeps, beside its work; what is damaged is dropped.

    Ends with 1 when something was damaged.
    """
    with _client(address, DEFAULT_TENANT, cluster_secret_file, timeout_s) as client:
        numbers = client.verify(timeout_s=timeout_s)
        while numbers.get("verify_running", 0):
            time.sleep(_LOOK_S)
            numbers = client.verify(start=False, timeout_s=timeout_s)
    _print_numbers({name: number for name, number in numbers.items() if name.startswith("verify_")}, as_json)
    if numbers.get("verify_damaged", 0):
        raise typer.Exit(1)


def purge(
    address: Address,
    *,
    tenant: Tenant = DEFAULT_TENANT,
    everything: Everything = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    cluster_secret_file: StoreSecretFile = None,
    timeout_s: TimeoutS = DEFAULT_TIMEOUT_S,
) -> None:
    """Forget all values of a tenant; with --all those of all tenants, and all KV."""
    target = "everything in the store" if everything else f"all values of tenant {tenant!r}"
    with _client(address, tenant, cluster_secret_file, timeout_s) as client:
        if not yes and not typer.confirm(f"forget {target} at {client.address}?"):
            raise UserError("nothing was forgotten", hint="answer y, or give --yes")
        typer.echo(f"forgotten: {client.purge(everything=everything, timeout_s=timeout_s):,} values")


def _client(address: str, tenant: str, secret_file: Path | None, timeout_s: float) -> StoreClient:
    from memserve.store.client.client import StoreClient

    return StoreClient(address, tenant, secret_file, timeout_s=timeout_s, staging_bytes=1)


def _print_numbers(numbers: dict[str, int], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(numbers))
        return
    width = max(map(len, numbers), default=0)
    for name, number in numbers.items():
        size = f"  ({human_bytes(number)})" if "bytes" in name and number >= 1024 else ""
        typer.echo(f"{name:<{width}}  {number:,}{size}")


def _described(entry: StoreEntry) -> dict[str, Any]:
    return {
        "key": entry.key.hex(),
        "name": _text(entry.name),
        "bytes": entry.length,
        "scope": f"{entry.scope:08x}",
        "where": _PLACES.get(entry.where, "?"),
    }


def _entry_line(entry: StoreEntry) -> str:
    name = _text(entry.name) or (f"KV {entry.key.hex()}" if not entry.scope else f"({entry.key.hex()})")
    return f"{entry.length:>12,}  {_PLACES.get(entry.where, '?'):<15}  {name}"


def _text(name: bytes) -> str:
    """A key as text where it is that, and can be printed; else in hexadecimal."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return f"0x{name.hex()}"
    return text if text.isprintable() else f"0x{name.hex()}"


DRAIN_S = 20.0
_SECRET_HINT = "make one: head -c 32 /dev/urandom | base64 > secret; then --cluster-secret-file secret"

Listen = Annotated[
    str | None,
    typer.Option(help="HOST:PORT for clients and `memserve serve --store`. Default: a free port, for members."),
]
Dram = Annotated[str, typer.Option(help="Memory, for example 2GiB.")]
Ssd = Annotated[
    list[str] | None,
    typer.Option(
        help="DIR=20GiB: keep values in a file of this size in folder DIR, too. NAME://LOCATION=20GiB: where a plug-in"
        " puts them (`memserve doctor` lists them). Repeatable, one folder a disk."
    ),
]
SsdSync = Annotated[
    str,
    typer.Option(
        help="When writes are made safe against a loss of power: none: never; segment: with each segment; always: with"
        " each value. The end of the process loses nothing that was written."
    ),
]
SsdWritesPerDay = Annotated[
    str, typer.Option(help="At most so much is written to all disks together within 24 hours. 0: no limit.")
]
SsdAdmission = Annotated[
    str,
    typer.Option(
        help="What is written once a disk has been full: second-hit: what was asked for before; all: everything."
    ),
]
KvCodec = Annotated[
    str,
    typer.Option(
        help="Whether values rest on disks, and KV travels between hosts, in fewer bytes, without losing a bit: auto:"
        " where it pays, by what disk, link and codec take here; none; always."
    ),
]
Join = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of the router, as opened by `memserve serve --cluster-port`: keep the KV of its instances, too."
        " A router and its standbys: separated by commas."
    ),
]
Name = Annotated[
    str | None,
    typer.Option(help="Name of the store, unique in the cluster; what it has left is found by it. Default: host."),
]
Advertise = Annotated[
    str | None, typer.Option(help="Host by which others reach the store. Default: the one that it listens at.")
]
ModelName = Annotated[
    str,
    typer.Option("--model", help="With --join: the name of the model whose KV it keeps, where the router has several."),
]
DrainS = Annotated[
    float, typer.Option(min=0, help="Seconds for writing what is in memory alone, after SIGTERM or SIGHUP.")
]

app = typer.Typer(invoke_without_command=True, subcommand_metavar="[stat|ls|verify|purge]", rich_markup_mode=None)
add_tools(app)


@app.callback()
def store(
    context: typer.Context,
    *,
    listen: Listen = None,
    dram: Dram = "1GiB",
    ssd: Ssd = None,
    ssd_sync: SsdSync = "segment",
    ssd_writes_per_day: SsdWritesPerDay = "0",
    ssd_admission: SsdAdmission = "second-hit",
    join: Join = None,
    name: Name = None,
    advertise: Advertise = None,
    cluster_secret_file: credentials.StoreSecretFile = None,
    link: opt.Link = opt.DEFAULT_LINK,
    kv_codec: KvCodec = "auto",
    drain_s: DrainS = DRAIN_S,
    health_file: opt.HealthFile = None,
    log_level: opt.LogLevel = opt.DEFAULT_LOG_LEVEL,
    model: ModelName = "",
    supervised: Annotated[bool, typer.Option(hidden=True, help="Run as a child of `memserve serve`.")] = False,
) -> None:
    """Keep KV and values in memory and on disks, through every restart; ends on SIGTERM, SIGHUP or Ctrl-C."""
    if context.invoked_subcommand is not None:
        return
    options = StoreOptions(
        folders=read_folders(ssd or []),
        dram_bytes=parse_bytes(dram),
        address=listen,
        sync=ssd_sync,
        writes_per_day_bytes=parse_bytes(ssd_writes_per_day),
        admission=ssd_admission,
    )
    options = with_absolute_folders(options)
    check_kv_codec(kv_codec)
    name = name or f"store-{socket.gethostname()}"
    opt.check_name(name)
    if supervised:
        _run_supervised(options, join or "", name, link, drain_s, log_level, kv_codec, model)
        return
    if listen is None and join is None:
        hint = "--listen 127.0.0.1:7100 for clients, or --join HOST:PORT for a cluster, or both"
        raise UserError("this store would serve neither clients nor a cluster", hint=hint, param="listen")
    opt.set_up_logging(log_level)
    secret = _secret(options, cluster_secret_file)
    place = _place(options, join, name, advertise, secret, link, drain_s, kv_codec, model, health_file=health_file)
    started = time.perf_counter()
    from memserve.store.host.process import run_store

    run_store(place, lambda run: _print_ready(place, run, started))


def _run_supervised(
    options: StoreOptions,
    join: str,
    name: str,
    link: str,
    drain_s: float,
    log_level: str,
    kv_codec: str,
    model: str,
) -> None:
    """Run as a child of ``memserve serve``: the secret comes through stdin, a final error goes to stdout."""
    with child_of_serve(join, name, log_level) as child:
        from memserve.store.host.process import run_store

        place = _place(options, join, name, None, child.secret, link, drain_s, kv_codec, model, child.host)
        place = dataclasses.replace(place, is_supervised=True, outlive=child.outlive)
        run_store(place, lambda run: None)
        logging.shutdown()


def _secret(options: StoreOptions, file: Path | None) -> Secret:
    """The cluster's secret: of the file, else the one that is kept beside the disks."""
    if file is not None:
        return follow_secret(file)
    secret = stored_secret(options)
    if secret is None:
        raise UserError("a store needs the cluster's secret: --cluster-secret-file", hint=_SECRET_HINT)
    return secret


def _place(
    options: StoreOptions,
    join: str | None,
    name: str,
    advertise: str | None,
    secret: Secret,
    link: str,
    drain_s: float,
    kv_codec: str,
    model: str,
    own_host: str | None = None,
    health_file: Path | None = None,
) -> StorePlace:
    from memserve.store.host.process import StorePlace

    if options.address is not None:
        host, port = split_address(options.address, "--listen")
    else:
        host, port = own_host or own_host_to(join or ""), 0
    store_secret(options, as_followed(secret).initial_value, print_lines)
    return StorePlace(
        name=name,
        host=host if advertise is None else listen_host(host),
        port=port,
        dram_bytes=options.memory_bytes,
        folders=options.folders,
        disks=disks_config(options, kv_codec),
        secret=secret,
        join=join_addresses(join) if join else (),
        advertise=advertise,
        link=link,
        drain_s=drain_s,
        health_file=health_file,
        model=model,
    )


def _print_ready(place: StorePlace, run: StoreRun, started: float) -> None:
    numbers = run.read_numbers()
    disks = "".join(f", {human_bytes(nbytes)} in {folder}" for folder, nbytes in place.folders)
    contents = f"{numbers['dram_values']:,} values in memory, {numbers['disk_records']:,} on disks"
    seconds = time.perf_counter() - started
    print_lines(
        f"ready in {seconds:.1f} s: {place.name} at {run.address.removeprefix('tcp://')},"
        f" {human_bytes(numbers['dram_bytes'])} of memory{disks}; {contents}",
        result=True,
    )


def disks_config(options: StoreOptions, kv_codec: str = "none") -> DisksConfig:
    """The settings of all disks."""
    from memserve.store.disks.events import DisksConfig

    return DisksConfig(
        sync=cast("Sync", options.sync),
        writes_per_day_bytes=options.writes_per_day_bytes,
        admission=cast("Admission", options.admission),
        kv_codec=KV_CODECS[kv_codec],
    )
