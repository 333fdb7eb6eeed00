"""Members of a cluster, and what others must know of them: the nouns of ``memserve.protocol.messages``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from memserve import _core
from memserve.base.layer_kv import WindowPages
from memserve.base.types import KVGeometry, Role, Tier

ROUTER = "router"
"""Name of the peer that hosts the ``Cluster`` machine."""
Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A number, index or amount. Decoding rejects other values, so machines need not check."""
Name = Annotated[str, msgspec.Meta(max_length=256)]


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages and their parts. Arrays on the wire, fields in order, tagged by the class's name."""


class Peer(Message, frozen=True):
    """One incarnation of one process. A restart has a new generation: promises of the old one are void."""

    name: Name
    generation: Natural


class Holder(Message, frozen=True):
    """A peer, an instance or a store, that has more of the prompt's prefix than the receiver of the message."""

    peer: Peer
    prefix_tokens: Natural
    tier: Tier = Tier.HBM
    disk_tokens: Natural = 0  # of ``prefix_tokens``: on the disks of a store alone
    stores: tuple[Peer, ...] = ()
    """The prefix is spread over these; ``peer`` is one of them. Empty: all of it is at ``peer``."""
    places: bytes = b""
    """Which of ``stores`` is to be asked for a block: a byte for each block of the prefix, and then for each of what
    comes behind its KV, a state or a window."""
    spares: bytes = b""
    """Which of ``stores`` has a second copy, 255: none. Empty: there are none."""


_MEMBERS_KEY = b"memserve members"


def members_digest(peers: Iterable[Peer]) -> int:
    """One number by which two processes see whether they know the same members, whatever the order: 56 bits."""
    digest = 0
    for peer in peers:
        name = _core.siphash128(_MEMBERS_KEY, f"{peer.generation} {peer.name}".encode("utf-8", "surrogatepass"))
        digest ^= int.from_bytes(name[:7], "little")
    return digest


class ShardPlace(Message, frozen=True):
    """Where one worker of an instance on several GPUs has its layers and KV heads of every block."""

    first_layer: Natural
    end_layer: Natural
    first_head: Natural
    end_head: Natural
    address: Natural
    """In the memory of the worker's process."""
    arena_bytes: Natural
    exported: bytes = b""
    """As of :class:`ArenaPlace`."""
    nixl_agent: bytes = b""
    """The worker's own; empty: the instance's."""


class ArenaPlace(Message, frozen=True):
    """Where the blocks of one tier lie in their owner's memory."""

    tier: Tier
    address: Natural
    arena_bytes: Natural
    fd: int = -1
    """The owner's descriptor of the shared memory, which peers on the same host open through ``/proc``; -1: none.
    Of a GPU's memory: of a page of shared memory that has its generation."""
    on_gpu: bool = False
    """Whether it is memory of a GPU."""
    exported: bytes = b""
    """What processes on the same host map a GPU's memory with (CUDA IPC). Empty: nothing does."""
    shards: tuple[ShardPlace, ...] = ()
    """Of an instance on several GPUs: its blocks lie in these, and ``arena_bytes`` counts whole blocks. Empty: in one
    memory."""


class PeerInfo(Message, frozen=True):
    """Everything that others must know of an instance before they work with it."""

    peer: Peer
    role: Role
    address: str
    """Where its mailbox listens, ``tcp://host:port``."""
    namespace: str
    """Model, weights, dtype, layout: instances share KV only when this is equal."""
    geometry: KVGeometry
    hbm_blocks: Natural
    dram_blocks: Natural
    context_tokens: Natural
    caching: bool
    host_id: str = ""
    """Equal on processes that can see each other under ``/proc``."""
    pid: Natural = 0
    arenas: tuple[ArenaPlace, ...] = ()
    nixl_agent: bytes = b""
    """NIXL agent metadata; empty: not reachable that way."""
    publishes_events: bool = True
    """Whether it reports KV events; if not, the trees record what was dispatched, with a TTL."""
    model_card: bytes = b""
    """What the edge must know of the model, as JSON (``model/loading/card.py``): the router itself loads no model."""
    costs: bytes = b""
    """What computing and moving KV cost there (``CostModel.to_json``); empty: nothing was measured."""
    segments_at: str = ""
    """Where it answers queries of longer sequences' other parts, ``tcp://host:port``; empty: it takes no such part."""
    sequence_tokens: Natural = 0
    """The longest sequence of which it can compute a part."""
    admission: str = ""
    """Of a follower: the kind of admission for which it asks the owner; empty: none."""
    pages_at: str = ""
    """Where it hands out pages through the cluster's channel, ``tcp://host:port``; empty: not that way."""
    staging_fd: int = -1
    """The descriptor of host memory into which it copies pages of its GPUs that processes on the same host ask for;
    -1: there is none."""
    staging_bytes: Natural = 0
    state_blocks: Natural = 0
    """Blocks that the recurrent state of a sequence, or its last window, takes at most where it is handed over, fetched
    or pinned. 0: layers keep KV alone, or it goes nowhere."""
    reports_layers: bool = False
    """Whether it can hand a prompt's KV over layer by layer while it computes it. False: its layers do not all keep the
    same, or no worker sees all of them."""
    step_tokens: Natural = 0
    """Of prompts and answers that one step computes; 0: not known."""
    computes_stripes: bool = False
    """Whether it takes part in prompts that several instances compute at once."""
    cores_share: float = 0.0
    """Of its host's cores, what its steps use; 0: it has a device of its own."""
    model: str = ""
    """The served model that it is for, by its name, where one router has several; empty: the first."""
    http_at: str = ""
    """Of a router: where clients find it, ``http://host:port``; empty: where they find its owner."""
    windows: WindowPages | None = None
    """How the parts of windows lie that are among ``state_blocks``. None: these are a recurrent state's."""


class Load(Message, frozen=True):
    """How busy an instance is. Gauges, except the totals that say so."""

    requests_waiting: Natural = 0
    sequences_running: Natural = 0
    prefill_tokens_queued: Natural = 0
    """Prompt tokens admitted or waiting that are not computed yet."""
    context_tokens_running: Natural = 0
    """Tokens in the contexts of running sequences: what a decode step reads."""
    hbm_blocks_available: Natural = 0
    """Free, or held by the cache alone."""
    transfers_open: Natural = 0
    dispatches_heard: Natural | None = None
    """Dispatches received since it became a member; others are lost, or under way. None: the instance does not say."""
    answers_told: Natural = 0
    """``Tokens`` and ``RequestRefused`` sent since it became a member, all before the heartbeat that says so."""
