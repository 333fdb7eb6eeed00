"""``memserve store stat|ls|verify|purge``: what a store holds, whether it is whole, and how to empty it."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memserve.cli.credentials import StoreSecretFile
from memserve.errors import UserError
from memserve.units import human_bytes

if TYPE_CHECKING:
    from memserve.client.store_client import StoreClient
    from memserve.store_messages import StoreEntry

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
            typer.echo(json.dumps(_described(entry)) if as_json else _line(entry))
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
    what = "everything in the store" if everything else f"all values of tenant {tenant!r}"
    with _client(address, tenant, cluster_secret_file, timeout_s) as client:
        if not yes and not typer.confirm(f"forget {what} at {client.address}?"):
            raise UserError("nothing was forgotten", hint="answer y, or give --yes")
        typer.echo(f"forgotten: {client.purge(everything=everything, timeout_s=timeout_s):,} values")


def _client(address: str, tenant: str, secret_file: Path | None, timeout_s: float) -> StoreClient:
    from memserve.client.store_client import StoreClient

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


def _line(entry: StoreEntry) -> str:
    name = _text(entry.name) or (f"KV {entry.key.hex()}" if not entry.scope else f"({entry.key.hex()})")
    return f"{entry.length:>12,}  {_PLACES.get(entry.where, '?'):<15}  {name}"


def _text(name: bytes) -> str:
    """A key as text where it is that, and can be printed; else in hexadecimal."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return f"0x{name.hex()}"
    return text if text.isprintable() else f"0x{name.hex()}"
