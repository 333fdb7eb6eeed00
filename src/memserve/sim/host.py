"""What nodes need of the world around them, and of the devices that a world puts into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from memserve.cluster.machine import Cluster
from memserve.config import MemberConfig
from memserve.instance.events import StepFailed, StepFinished, StepPlan
from memserve.instance.machine import Instance
from memserve.kv_transfer.events import CancelPulls, PullPages, SealPages
from memserve.messages import PeerInfo
from memserve.sim.clock import Clock
from memserve.sim.network import Network
from memserve.types import TokenOutput

if TYPE_CHECKING:
    from memserve.sim.nodes import InstanceNode, RouterNode
    from memserve.sim.process import Process


class Device(Protocol):
    """Executes plans strictly in order. Between :meth:`step_ns` and the answer that time passes."""

    @property
    def layers(self) -> int:
        """How many layers report that they are done, for a plan with ``report_layers``."""

    def step_ns(self, plan: StepPlan) -> int:
        """How long ``plan`` will take, its copies included."""

    def finish_layer(self, plan: StepPlan, layer: int) -> bool:
        """``layer`` of the plan under way is computed; whether that is to be told."""

    def run(self, plan: StepPlan) -> StepFinished | StepFailed:
        """The plan has been executed, or has failed."""


class DataPort(Protocol):
    """Moves pages beside the device. Each job but a cancellation is answered through ``node.post``, at its time."""

    def seal(self, job: SealPages) -> None:
        """Answer with ``PagesSealed``."""

    def pull(self, job: PullPages) -> None:
        """Answer with ``PagesPulled``."""

    def cancel(self, job: CancelPulls) -> None:
        """Pulls from a peer need not begin; each is answered all the same."""


class Host(Protocol):
    """A world. ``clock`` and ``network`` are shared by all its nodes."""

    @property
    def clock(self) -> Clock:
        """Virtual time."""

    @property
    def network(self) -> Network:
        """The wires between the nodes."""

    @property
    def member_config(self) -> MemberConfig:
        """How often an instance says that it lives, and how long it waits for its router."""

    @property
    def router_addresses(self) -> Sequence[str]:
        """Where instances look for a router, in turn."""

    @property
    def router(self) -> RouterNode:
        """The one router there is."""

    @property
    def tells(self) -> bool:
        """Whether :meth:`say` is wanted: else nobody builds lines."""

    def new_cluster(self) -> Cluster:
        """The machine of the router, which starts now."""

    def new_instance(self, node: InstanceNode) -> Instance:
        """The machine of an instance, which starts now as ``node.peer``."""

    def new_device(self, node: InstanceNode) -> Device:
        """Its device."""

    def new_port(self, node: InstanceNode) -> DataPort:
        """Its way to the pages of others."""

    def peer_info(self, node: InstanceNode) -> PeerInfo:
        """What it tells of itself when it joins."""

    def emitted(self, output: TokenOutput) -> None:
        """The router gives tokens to a client."""

    def turned_away(self, request_id: str, reason: str, retry_after_s: float | None) -> None:
        """The router rejects a client's request."""

    def handled(self, node: Process, event: object, actions: Sequence[object]) -> None:
        """A machine has handled ``event``; none of ``actions`` is done yet."""

    def say(self, line: str, what: object = "") -> None:
        """Something worth telling happened; ``what`` is written out only when somebody reads it."""
