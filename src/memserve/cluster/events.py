"""What may happen to the cluster, and what it asks its host to do (level 2).

The words that instances use too are in :mod:`memserve.serving`; only what a router alone hears is declared here.
"""

from __future__ import annotations

from dataclasses import dataclass

from memserve.policy.candidates import RoutingCosts
from memserve.serving import (
    ClockTicked,
    EmitTokens,
    MessageArrived,
    PrefixPinned,
    PrefixUnpinned,
    RejectRequest,
    RequestArrived,
    RequestCancelled,
    Send,
    SequenceStopped,
)


@dataclass(frozen=True, slots=True)
class InstanceDrained:
    """Somebody asked for the end of the instance ``name``: it finishes what it has, gets nothing new, and leaves."""

    name: str


@dataclass(frozen=True, slots=True)
class CostsMeasured:
    """A member has told what computing and moving cost on its machine: decisions go by that from now on."""

    costs: RoutingCosts


ClusterEvent = (
    RequestArrived
    | RequestCancelled
    | SequenceStopped
    | ClockTicked
    | MessageArrived
    | InstanceDrained
    | PrefixPinned
    | PrefixUnpinned
    | CostsMeasured
)
ClusterAction = Send | EmitTokens | RejectRequest

__all__ = [
    "ClockTicked",
    "ClusterAction",
    "ClusterEvent",
    "CostsMeasured",
    "EmitTokens",
    "InstanceDrained",
    "MessageArrived",
    "PrefixPinned",
    "PrefixUnpinned",
    "RejectRequest",
    "RequestArrived",
    "RequestCancelled",
    "Send",
    "SequenceStopped",
]
