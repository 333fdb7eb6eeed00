"""``memserve sim thrash``: more conversations than fit into memory, without and with admission and a store."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from memserve.cli import options as opt
from memserve.cli.bench_load import Folder, command, run_study
from memserve.cli.sim_run import Wanted
from memserve.config import AdmissionConfig, ClusterConfig
from memserve.errors import UserError
from memserve.types import Admission
from memserve.units import NS_PER_S

if TYPE_CHECKING:
    from memserve.bench.thrash import Contender

PATIENT = Wanted(
    "colocated=1",
    kv_blocks=3200,
    cluster=ClusterConfig(admission=AdmissionConfig(waiting_max=4096, wait_ns=60 * NS_PER_S)),
)
"""Clients wait for admission rather than being rejected: what is counted is the work that is done."""
STORE_MULTIPLE = 8
"""Without --store the store's memory holds so many times the KV of all instances: every conversation that is tried."""


@opt.grouped
def thrash(
    *,
    wanted: Annotated[
        Wanted,
        opt.Only(
            "instances",
            "model",
            "device",
            "profile",
            "kv_blocks",
            "block_tokens",
            "dram_memory_bytes",
            "heartbeat_ms",
            "store_bytes",
            "ssd_bytes",
            "store_count",
            "ssd_device",
            "ssd_sync",
            "ssd_writes_per_day_bytes",
            "ssd_admission",
            "policy",
            "caching",
            "waiting_max",
            "wait_ns",
        ),
    ] = PATIENT,
    multiples: Annotated[
        str, typer.Option(help="Clients to try, in multiples of the conversations that fit into HBM.")
    ] = "1,2,3,4,6,8",
    turns: Annotated[int, typer.Option(min=1, help="Turns of a conversation.")] = 6,
    first_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a conversation's first prompt.")] = 4000,
    turn_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each further turn adds.")] = 500,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    warm_s: Annotated[float, typer.Option(min=0, help="Virtual seconds before anything is counted.")] = 40.0,
    measured_s: Annotated[float, typer.Option(min=1, help="Virtual seconds that are counted.")] = 60.0,
    out: Folder = None,
) -> None:
    """Requests a second and hit rate with 1 to 8 times the conversations that fit into memory.

    Four settings: as given, with --admission cache, with a store, with both. Clients ask the next turn as soon as the
    last answer has ended.
    """
    from memserve.bench.study import RunFolder
    from memserve.bench.thrash import Plan, Talk, ThrashResults, ThrashStudy

    talk = Talk(turns, first_tokens, turn_tokens, answer_tokens)
    plan = Plan(contenders_of(wanted), read_multiples(multiples), talk, warm_s, measured_s)
    machine = wanted.machine().name
    study = ThrashStudy(plan, ThrashResults(command=command(), machine={"simulated": f"{wanted.instances}, {machine}"}))
    run_study(study, RunFolder(out))


def contenders_of(wanted: Wanted) -> tuple[Contender, ...]:
    """The four settings. The store has the memory that is asked for, or enough for all conversations."""
    from memserve.bench.thrash import Contender

    plain = dataclasses.replace(wanted, stores=type(wanted.stores)()).setup()
    stores = wanted.stores
    if not stores.is_wanted:
        kv_bytes = plain.machine.hbm_blocks * plain.machine.geometry.block_bytes * sum(plain.instances.values())
        stores = dataclasses.replace(stores, store_bytes=STORE_MULTIPLE * kv_bytes)
    admission = dataclasses.replace(plain.cluster.admission, mode=Admission.CACHE)
    gated = dataclasses.replace(plain, cluster=dataclasses.replace(plain.cluster, admission=admission))
    kept = stores.setup()
    return (
        Contender("as it is", plain),
        Contender("--admission cache", gated),
        Contender("store", dataclasses.replace(plain, stores=kept)),
        Contender("store, --admission cache", dataclasses.replace(gated, stores=kept)),
    )


def read_multiples(text: str) -> tuple[float, ...]:
    """``1,2,4``, in rising order. Raises :class:`UserError` for anything else."""
    try:
        multiples = sorted({float(part) for part in text.split(",")})
    except ValueError:
        multiples = []
    if not multiples or not 0 < multiples[0] <= multiples[-1] < 1e4:
        raise UserError(f"cannot read {text!r} as multiples", hint="for example --multiples 1,2,4,8")
    return tuple(multiples)
