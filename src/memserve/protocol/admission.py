"""What routers tell each other of admission: the owner has the queue and the ledger, followers ask for their requests.

::

    follower                                     owner
    AdmissionRequests(serial, asks) -------------->  each is a *remote request* in the queue, as one of the owner's own
                                            <--  AdmissionGrants(serial, lease, grants)
    AdmissionRequests(places, over) -------------->  the ledger counts where it runs, until it has ended
    AdmissionRequests(open), with each heartbeat ->  repairs what was lost
                                            <--  AdmissionGrants(serial, lease)         the follower goes on dispatching

A follower dispatches under a lease alone. It ends before the owner may take the follower to be dead, and give what was
granted to it to others.
"""

from __future__ import annotations

from memserve.base.types import Request
from memserve.protocol.peers import Holder, Message, Natural, Peer


class AdmissionRequest(Message, frozen=True):
    """A follower asks for the admission of one of its requests."""

    number: Natural
    """Its name between the two."""
    request: Request
    emitted: Natural = 0
    """Tokens that the client has of its longest sequence."""
    is_admitted: bool = False
    """The last owner, whose place the receiver has taken, has admitted it."""
    returns: bool = False
    """It was admitted before its follower was expelled: it is the next one."""


class AttemptPlacement(Message, frozen=True):
    """Where an admitted request runs now, for memory-aware admission."""

    number: Natural
    attempt: Natural
    """Counted from 1 for each request."""
    at: tuple[Peer, ...]
    """The instances that it depends on: that which computes the prompt, and that which decodes. Empty: none."""
    holders: tuple[Holder, ...] = ()
    """Those that it may fetch from."""
    prefilled: bool = False
    """The prompt is computed: it fetches nothing any more."""
    emitted: Natural = 0
    """Tokens that the client had when the attempt began."""


class AdmissionRequests(Message, frozen=True, tag="GuestRequests"):
    """Follower -> owner: news of its requests."""

    serial: Natural
    """Grows: one that comes late is not read."""
    asks: tuple[AdmissionRequest, ...] = ()
    places: tuple[AttemptPlacement, ...] = ()
    over: tuple[tuple[Natural, bool], ...] = ()
    """Numbers of requests that have ended; True: the KV that they have computed stays in the cache."""
    open: tuple[Natural, ...] | None = None
    """All that have not ended; the owner is to answer. None: not told this time."""
    is_whole: bool = False
    """``asks`` and ``places`` tell of all that have not ended."""


class AdmissionGrant(Message, frozen=True):
    """A request is admitted, or rejected."""

    number: Natural
    at: tuple[Peer, ...] = ()
    """With memory-aware admission: the instances that have room for it."""
    cause: str = ""
    """Why it is rejected, as in ``AdmissionStats.rejected``; empty: it is admitted."""
    reason: str = ""
    retry_after_s: float | None = None
    """None: it can never run."""


class AdmissionGrants(Message, frozen=True, tag="GuestGrants"):
    """Owner -> follower: what was decided, and that the owner still counts the follower."""

    serial: Natural
    """Of the follower's last news."""
    lease_ns: Natural
    """How long the follower may dispatch, from when it sent those news."""
    grants: tuple[AdmissionGrant, ...] = ()
