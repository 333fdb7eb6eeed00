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

import argparse
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from router_overhead import cpu_seconds, free_port, wait_until_ready, write_load

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
from memserve.system.secrets import followed
from memserve.transport.data_port import open_data_port
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.ports import Device
from memserve.transport.request_server import ListenAddress

PERIOD_US = 100_000
"""A router's share is given to it anew this often: the kernel's default. Shorter ones cost the routers more."""

TOKEN = 100
"""What is always drawn."""


# -- an instance that computes nothing


class NullDevice(Device):
    """A device whose steps take no time, and draw the same token always."""

    def execute(self, plan: StepPlan) -> StepFinished:
        """See :class:`memserve.transport.ports.Device`."""
        draws = sum(map(len, plan.sample_slots))
        return StepFinished(plan.step_id, [TOKEN] * draws, device_ns=1000)

    def build_grammar(self, grammar: str, on_built: Callable[[str], None]) -> None:
        """See :class:`memserve.transport.ports.Device`."""
        on_built("there are no grammars here")

    def forget_grammar(self, grammar: str) -> None:
        """See :class:`memserve.transport.ports.Device`."""

    def close(self) -> None:
        """See :class:`memserve.transport.ports.Device`."""


def be_instance(name: str, model: Path, join: str) -> None:
    """A process: the instance ``name``, until stdin ends."""
    keep_heap_small()
    secret = os.environ["ROUTER_SECRET"]
    sizes = json.loads((model / "config.json").read_text())
    context, vocabulary = int(sizes["max_position_embeddings"]), int(sizes["vocab_size"])
    geometry = KVGeometry(num_layers=30, num_kv_heads=3, head_dim_k=64, head_dim_v=64, dtype="bfloat16")
    me = Peer(name, new_generation())
    config = InstanceConfig(
        context, "null", PoolConfig(4096, identity_key=identity_key(followed(secret).first)),
        SchedulerConfig(max_step_tokens=65536), Role.COLOCATED, ExchangeConfig(shares_kv=False), vocabulary,
    )  # fmt: skip
    machine = Instance(config, geometry.block_tokens, me=me, geometry=geometry)
    card = ModelCard(model.name, context, vocabulary, (0,), {}, "TokenizersBackend").encode()
    info = PeerInfo(
        me, Role.COLOCATED, "", "null", geometry, 4096, 0, machine.context_tokens, True,
        publishes_events=True, model_card=card,
    )  # fmt: skip
    where = ListenAddress(secret)
    links = MemberLinks(
        lambda me, hear: ZmqMailbox(me, where, hear),
        lambda on_pages: open_data_port("shm", geometry, {}, on_pages, where),
    )
    member = MemberProcess(machine, NullDevice(), info, [f"tcp://{join}"], links)
    member.start()
    assert member.wait_joined(60), "the router does not answer"
    sys.stdin.read()
    member.close()


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
    made: list[Path] = []
    root = cpu_groups() if share else Path()
    try:
        for pid in pids if share else ():
            group = root / f"memserve-router-{pid}"
            group.mkdir()
            made.append(group)
            quota_us = int(share * PERIOD_US)
            if (group / "cpu.max").exists():
                (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for group in made:
            for left in (group / "cgroup.procs").read_text().split():
                (root / "cgroup.procs").write_text(left)
            group.rmdir()


# -- the measurement


@contextmanager
def cluster(options: argparse.Namespace, routers: int) -> Iterator[tuple[str, list[int]]]:
    """Instances and ``routers`` routers: their address, and their process ids."""
    with tempfile.TemporaryDirectory() as name:
        secret, http, port = secrets.token_urlsafe(32), free_port(), free_port()
        (Path(name) / "secret").write_text(secret)
        serve = ["serve", "--model", options.model, "--prefill", "0", "--decode", "0", "--colocated", "0"]
        serve += ["--cluster-port", str(port), "--cluster-secret-file", f"{name}/secret", "--port", str(http)]
        serve += ["--metadata", "none", "--served-model-name", "m", "--routers", str(routers)]
        owner = subprocess.Popen([sys.executable, "-m", "memserve", *serve], stderr=subprocess.DEVNULL)
        processes = [owner]
        environment = {**os.environ, "ROUTER_SECRET": secret}
        try:
            for number in range(options.instances):
                command = [sys.executable, __file__, "--be-instance", f"null-{number}", options.model]
                command += [f"127.0.0.1:{port}"]
                processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=environment))
            wait_until_ready(f"http://127.0.0.1:{http}")
            time.sleep(5)  # the other routers bind the port when they are ready, a moment after the first
            pids = routers_of(owner.pid)
            assert len(pids) == routers, "not all routers have started"
            yield f"http://127.0.0.1:{http}", pids
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait(60)


def routers_of(owner: int) -> list[int]:
    """The process ids of ``owner`` and of its followers."""
    found = [owner]
    for children in Path(f"/proc/{owner}/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            if "router" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                found.append(pid)
    return found


def measure(options: argparse.Namespace, script: Path, routers: int) -> tuple[float, float, float, int]:
    """Requests/s, CPU time of the routers a request in us, the part of their share that they took, failures."""
    with cluster(options, routers) as (url, pids), limited(pids, options.share):
        load = ["wrk", "-t1", f"-c{options.connections}", "--timeout", "30s", "-s", str(script), url]
        subprocess.run([*load, "-d2s"], capture_output=True, check=True)
        before_s = sum(map(cpu_seconds, pids))
        run = subprocess.run([*load, f"-d{options.seconds:.0f}s"], capture_output=True, text=True, check=True)
        spent_s = sum(map(cpu_seconds, pids)) - before_s
    requests, micros, _, _, bad = map(int, run.stderr.split()[-5:])
    taken = spent_s / (micros / 1e6) / (routers * (options.share or 1.0))
    return requests / micros * 1e6, 1e6 * spent_s / requests, taken, bad


def main() -> None:
    """Measure each number of routers in turn, round by round, and print a line for each and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model's folder, for its tokenizer and vocabulary")
    parser.add_argument("--routers", default="1,2")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.4, help="of a core for each router; 0: no limit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    if not shutil.which("wrk"):
        print("skipped: wrk is not installed (Debian: apt install wrk)")
        return
    counts = [int(word) for word in options.routers.split(",")]
    rates: dict[int, list[float]] = {count: [] for count in counts}
    vocabulary = json.loads((Path(options.model) / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as name:
        script = write_load(Path(name), options.tokens, "ids", vocabulary)
        for _ in range(options.rounds):
            for count in counts:
                rate, cpu_us, taken, bad = measure(options, script, count)
                rates[count].append(rate)
                print(
                    f"{count} routers: {rate:.0f} requests/s, {bad} bad; {cpu_us:.0f} us of their CPU a request; "
                    f"they took {taken:.2f} of their share",
                    flush=True,
                )
    first = statistics.median(rates[counts[0]])
    for count in counts:
        rate = statistics.median(rates[count])
        print(
            f"{count} routers, median of {options.rounds}: {rate:.0f} requests/s, {rate / first:.2f} times {counts[0]}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--be-instance"]:
        be_instance(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    else:
        main()
