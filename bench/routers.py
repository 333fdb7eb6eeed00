"""Requests per second with one router process and with several, at one port, in front of the same instances.

    python bench/routers.py --model FOLDER [--routers 1,2] [--share 0.4] [--rounds 3] [--tokens 1024]

The routers are those of ``memserve serve --routers N``. An instance is a process with the machine, the mailbox and the
membership of real ones, and a device that computes nothing: so it tells every router what real ones tell. wrk (which
must be installed) posts prompts of token ids, as in ``router_overhead.py``, over connections that the kernel spreads
over the routers.

A router that has as much to do as it can takes a core, and so do instances and load. ``--share 0.4`` gives each router
process two fifths of a core, by a control group of its own (Linux, as root), so that a machine of two cores has room
for what is around them: then requests per second tell how routers scale. What is printed beside: how much of its
share a router took (below 0.9, something else was the limit), the CPU time of all routers a request.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from harness.flags import Commas, options, save
from harness.processes import process
from harness.rounds import medians, turns
from harness.routers import memserve_router, need_wrk, run_wrk, vocabulary_of, wait_until_ready, write_load
from harness.tables import Table, show

from memserve.base.config import ExchangeConfig, InstanceConfig, PoolConfig, SchedulerConfig
from memserve.base.types import KVGeometry, Role
from memserve.host.member import MemberLinks, MemberProcess
from memserve.instance.events import StepFinished, StepPlan
from memserve.instance.machine import Instance
from memserve.kv.identity import identity_key
from memserve.model.loading.card import ModelCard
from memserve.protocol.peers import Peer, PeerInfo
from memserve.system.memory import keep_heap_small
from memserve.system.process import new_generation
from memserve.system.secrets import as_followed
from memserve.transport.data_port import open_data_port
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress
from memserve.transport.ports import Device
from process_tree import children_of, command_of

PERIOD_US = 100_000
"""A router's share is given to it anew this often: the kernel's default. Shorter ones cost the routers more."""

TOKEN = 100
"""What is always drawn."""


# -- an instance that computes nothing


class NullDevice(Device):
    """A device whose steps take no time, and draw the same token always."""

    def execute(self, plan: StepPlan) -> StepFinished:
        draws = sum(map(len, plan.sample_slots))
        return StepFinished(plan.step_id, [TOKEN] * draws, device_ns=1000)

    def build_grammar(self, grammar: str, on_built: Callable[[str], None]) -> None:
        on_built("there are no grammars here")

    def forget_grammar(self, grammar: str) -> None:
        """See :class:`memserve.transport.ports.Device`."""

    def close(self) -> None:
        """See :class:`memserve.transport.ports.Device`."""


def be_instance(name: str, model: Path, join: str) -> None:
    """A process: the instance ``name``, until it is ended."""
    keep_heap_small()
    secret = os.environ["ROUTER_SECRET"]
    sizes = json.loads((model / "config.json").read_text())
    context, vocabulary = int(sizes["max_position_embeddings"]), int(sizes["vocab_size"])
    geometry = KVGeometry(num_layers=30, num_kv_heads=3, head_dim_k=64, head_dim_v=64, dtype="bfloat16")
    self_peer = Peer(name, new_generation())
    config = InstanceConfig(
        context, "null", PoolConfig(4096, identity_key=identity_key(as_followed(secret).initial_value)),
        SchedulerConfig(max_step_tokens=65536), Role.COLOCATED, ExchangeConfig(shares_kv=False), vocabulary,
    )  # fmt: skip
    machine = Instance(config, geometry.block_tokens, self_peer=self_peer, geometry=geometry)
    card = ModelCard(model.name, context, vocabulary, (0,), {}, "TokenizersBackend").encode()
    info = PeerInfo(
        self_peer, Role.COLOCATED, "", "null", geometry, 4096, 0, machine.context_tokens, True,
        publishes_events=True, model_card=card,
    )  # fmt: skip
    address = ListenAddress(secret)
    links = MemberLinks(
        lambda self_peer, hear: ZmqMailbox(self_peer, address, hear),
        lambda on_pages: open_data_port("shm", geometry, {}, on_pages, address),
    )
    member = MemberProcess(machine, NullDevice(), info, [f"tcp://{join}"], links)
    member.start()
    assert member.wait_joined(60), "the router does not answer"
    threading.Event().wait()


# -- shares of a core


def cpu_groups() -> Path:
    """Where control groups of CPU time are made. Ends the script where there are none to be had."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        if (kind == "cgroup" and "cpu" in options.split(",")) and os.access(folder, os.W_OK):
            return Path(folder)
        if kind == "cgroup2" and os.access(folder, os.W_OK):
            names = (Path(folder) / "cgroup.subtree_control").read_text().split()
            if "cpu" in names:
                return Path(folder)
    raise SystemExit("no control groups of CPU time that may be written to (Linux, as root): use --share 0")


@contextmanager
def limited(pids: list[int], share: float) -> Iterator[None]:
    """Each of ``pids`` has ``share`` of a core; 0: as much as there is."""
    groups: list[Path] = []
    root = cpu_groups() if share else Path()
    try:
        for pid in pids if share else ():
            group = root / f"memserve-router-{pid}"
            group.mkdir()
            groups.append(group)
            quota_us = int(share * PERIOD_US)
            if (group / "cpu.max").exists():
                (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for group in groups:
            for leftover_pid in (group / "cgroup.procs").read_text().split():
                (root / "cgroup.procs").write_text(leftover_pid)
            group.rmdir()


# -- the measurement


@contextmanager
def cluster(args: Namespace, routers: int) -> Iterator[tuple[str, list[int]]]:
    """Instances and ``routers`` routers: their address, and their process ids."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        owner = stack.enter_context(memserve_router(str(args.model), folder, "--routers", str(routers)))
        for number in range(args.instances):
            command = [sys.executable, __file__, "--be-instance", f"null-{number}", str(args.model), owner.cluster]
            stack.enter_context(process(command, environment={**os.environ, "ROUTER_SECRET": owner.secret}))
        wait_until_ready(owner.url)
        time.sleep(5)  # the other routers bind the port when they are ready, a moment after the first
        pids = routers_of(owner.pid)
        assert len(pids) == routers, "not all routers have started"
        yield owner.url, pids


def routers_of(owner: int) -> list[int]:
    """The process ids of ``owner`` and of its followers."""
    return [owner, *(child for child in children_of(owner) if "router" in command_of(child))]


def measure(args: Namespace, script: Path, routers: int) -> dict[str, Any]:
    """A row: beside wrk's figures the part of their share that the routers took."""
    with cluster(args, routers) as (url, pids), limited(pids, args.share):
        run_wrk(url, script, args.connections, 2, pids)
        row = run_wrk(url, script, args.connections, args.seconds, pids)
    return {"routers": routers, "taken": row["cores"] / (routers * (args.share or 1.0)), **row}


COLUMNS = {
    "routers": "{routers:.0f}", "requests/s": "{requests_per_s:.0f}", "bad": "{bad:.0f}",
    "CPU a request, us": "{router_cpu_us:.0f}", "of their share": "{taken:.2f}", "beside the first": "{ratio:.2f}x",
}  # fmt: skip


def main() -> None:
    """Measure each number of routers in turn, round by round, and print a row for each, and the medians."""
    args = options(
        __doc__, required="model", model=(Path, "a model's folder, for its tokenizer and vocabulary"),
        routers=Commas(1, 2), instances=2, share=(0.4, "of a core for each router; 0: no limit"), rounds=3,
        connections=64, tokens=1024, seconds=10.0,
    )  # fmt: skip
    need_wrk()
    rows: dict[int, list[dict[str, Any]]] = {count: [] for count in args.routers}
    table = Table(COLUMNS)
    with tempfile.TemporaryDirectory() as name:
        script = write_load(Path(name), args.tokens, "ids", vocabulary_of(args.model))
        for _, count in turns(args.rounds, args.routers):
            rows[count].append(measure(args, script, count))
            table.show(rows[count][-1])
    print(f"\nmedians of {args.rounds} rounds\n")
    results = [medians(figures) for figures in rows.values()]
    show((row | {"ratio": row["requests_per_s"] / results[0]["requests_per_s"]} for row in results), COLUMNS)
    save(args, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--be-instance"]:
        be_instance(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    else:
        main()
