"""The messages between the processes of a cluster.

Every message is a frozen struct with a tag; ``transport`` puts it into an envelope (sender, receiver, number)
and onto the wire. Machines get it as ``MessageArrived(sender, message)`` and answer with ``Send(to, message)``. No
sender depends on an answer to stay correct: every wait has a deadline.

KV moves by *pulling*: the owner of blocks offers them and the receiver reads. Every arena has one writer, its owner. A
peer that was paused and wakes up late can read old bytes, which their checksums reveal, but can never write into blocks
that have another holder by then.

::

    P (prefill)                                  D (decode)
    Offer(handoff: request, tokens, blocks) -->  matches its own index, allocates what it lacks
                                            <--  Wanted(first_block)             only a hint: what need not be sealed
    Ready(blocks, layers, checksums)        -->  pulls, compares checksums       as often as there is something new
    Handoff(first tokens)                   -->  inserts, decodes, streams
                                            <--  Release                         the offer's references go back
    ...
    pulls, inserts                          <--  Offer(insert), Ready            generated KV goes home (PD-Caching-3)
    Release                                 -->

A request that migrates takes the same way, behind a copy of what is complete::

    router: Migrate                         -->  S
    S (source)                                   T (target)
    Offer(insert), Ready                    -->  pulls, inserts         while S decodes on; again, if it took long
                                            <--  Release
    Offer(handoff), Ready, Handoff          -->  the rest, and all tokens so far
                                                 HandedOver --> router

What an instance tells its router about its index, beside ``memserve.protocol.messages``.

Sequences larger than an instance: their parts, and what is said about them, beside ``memserve.protocol.messages``.

::

    router                     holder A          holder B              runner
    Dispatch(span: holds)  --> computes [0, a)
    SegmentHeld            <-- keeps its blocks
    Dispatch(span: holds)  -------------------> computes [a, b), asks A
    SegmentHeld            <------------------- keeps its blocks
    Dispatch(span)         ------------------------------------------> computes [b, n), decodes, asks A and B
    Cancel                 --> --> when the request has ended

All dispatches of an attempt have one id: it names the held segments. A holder repeats ``SegmentHeld``, so that a router
that has forgotten the attempt can cancel it.

Prompts that several instances compute at once, in stripes: all of them are dispatched together, and KV moves.

::

    router                     A (stripes 0, 2)   runner (stripes 1, 3)
    Dispatch(span: stripes) -> --> computes 0     --> waits for layer 0 of stripe 0
                               Offer(part_of), Ready (layer 0) -->  pulls, begins with stripe 1
                               Ready (layer 1)                 -->  pulls, while it computes layer 0 ...
    Cancel                 --> when the runner has drawn
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from memserve.base.types import Request, Tier, TokenArray, TokenOutput, TransferMode
from memserve.protocol.admission import AdmissionGrants, AdmissionRequests
from memserve.protocol.idempotency import AnswersHeld, AnswerTaken, QueryAnswers
from memserve.protocol.kv_hints import KvHint, KvHintDone
from memserve.protocol.peers import Holder, Load, Message, Natural, Peer, PeerInfo
from memserve.protocol.store import CALL_KEYS_MAX, KEY_BYTES, JoinRequest, StoreMessage

Identities = Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES * CALL_KEYS_MAX)]
"""16 bytes a block, one behind the other."""


class KvChange(Message, frozen=True):
    """One change of an instance's index; see ``memserve.kv.events.KvEvent``."""

    kind: str  # stored | moved | evicted
    tier: Tier
    identities: bytes
    """16 bytes a block, one behind the other."""


class KvEvents(Message, frozen=True, tag=True):
    """Changes number ``first``, ``first + 1``, ... of this generation."""

    first: Natural
    changes: tuple[KvChange, ...]
    load: Load | None = None
    """How busy the instance is, where other routers have placed something there. None: nothing new is said of that."""


class KvSnapshot(Message, frozen=True, tag=True):
    """Everything that the index holds, right before change number ``next_event``."""

    next_event: Natural
    hbm: bytes
    dram: bytes
    ssd: bytes = b""


class QueryKvEvents(Message, frozen=True, tag="AskEvents"):
    """Changes were missed: send them again from number ``first``, or a snapshot when they are gone."""

    first: Natural


RETRY_S = 0.2
"""Between two looks whether instances are free for parts of another sequence."""


class Segment(Message, frozen=True):
    """Tokens of a sequence, one behind the other, whose KV another instance keeps."""

    peer: Peer
    address: str
    """Where it answers queries, ``tcp://host:port``."""
    tokens: Natural


class Stripe(Message, frozen=True):
    """Tokens of a prompt, behind those of the stripe before: whole blocks, but for the last stripe."""

    peer: Peer
    """Computes them, or has them cached."""
    tokens: Natural


class Span(Message, frozen=True):
    """Which part of a sequence the receiver of a ``Dispatch`` computes: what the request has as its prompt."""

    before: TokenArray
    """All tokens before that part."""
    segments: tuple[Segment, ...]
    """The instances that keep the KV of those, in order."""
    holds: bool
    """True: compute the prompt, and keep it until ``Cancel``. False: this is the last part, with the answer."""
    stripes: tuple[Stripe, ...] = ()
    """Of the whole prompt, one behind the other, which these instances compute at once: nothing is ``before``, and the
    receiver's prompt ends with the last of its own stripes. Empty: segments are computed one after the other."""


class SegmentHeld(Message, frozen=True, tag=True):
    """The holder has computed its part of a request, and answers queries."""

    request_id: str
    tokens: Natural


Checksum = Annotated[int, msgspec.Meta(ge=0)]
"""64 bits."""


# -- membership: instance <-> router


class Join(Message, frozen=True, tag=True):
    """An instance wants to be a member. Repeated until ``JoinAccepted`` or ``Refused``."""

    info: PeerInfo
    sent_to: str = ""
    """The address at which the instance looks for a router; its ``JoinAccepted`` repeats the address."""


class JoinAccepted(Message, frozen=True, tag=True):
    """The instance is a member; these are the others."""

    peers: tuple[PeerInfo, ...]
    joined_at: str = ""
    """``Join.sent_to`` of the ``Join`` that this answers; empty: it answers none."""
    store_copies: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)] = 1
    """In how many of several stores each block is to lie."""


class RejoinRequest(Message, frozen=True, tag=True):
    """The router was restarted, listens here and remembers you: join again, keep all work. Repeated until ``Join``."""

    address: str
    after: Natural = 0  # generation of the router whose place this one takes; 0: not known


class Refused(Message, frozen=True, tag=True):
    """The instance cannot be a member. From a store to a router: it belongs to another."""

    reason: str


class PeerJoined(Message, frozen=True, tag=True):
    """There is a new member."""

    info: PeerInfo


class PeerGone(Message, frozen=True, tag=True):
    """A member left or is taken to be dead: free what it holds, wait for nothing from it."""

    peer: Peer
    reason: str


class Expelled(Message, frozen=True, tag=True):
    """You were taken to be dead, and others act accordingly: drop all work and join again as a new generation."""

    reason: str
    newest: Natural = 0
    """The newest generation of this name that is known: yours must be higher, whatever your wall clock says."""


class Drain(Message, frozen=True, tag=True):
    """Take no new requests, finish what you have, then leave."""


class Leave(Message, frozen=True, tag=True):
    """The instance goes away in good order."""


class Heartbeat(Message, frozen=True, tag=True):
    """The instance lives. ``next_event`` is the number that its next KV event will have: a lost last one is noticed."""

    load: Load
    next_event: Natural = 0
    stats: bytes = b""
    """The engine's statistics for ``/metrics``, msgpack of ``EngineStats``; not every heartbeat carries them."""
    members_digest: Natural = 0
    """:func:`members_digest` of all members that the instance knows, itself included: a lost ``PeerJoined`` or
    ``PeerGone`` is noticed. 0: not given."""
    wants_ack: bool = False
    """True: the router is to answer with ``HeartbeatAck``. The instance has heard no router for a while, and knows
    another address."""
    costs: bytes = b""
    """What the instance has learnt of its costs, as ``PeerInfo.costs``; empty: nothing beyond what it said there."""


class HeartbeatAck(Message, frozen=True, tag=True):
    """The router lives, and so does the instance, as far as it knows."""


# -- requests: router <-> instance. ``request.request_id`` names one attempt: it tells answers to old attempts.


class Dispatch(Message, frozen=True, tag=True):
    """Run this request, or its prefill."""

    request: Request
    deadline_in_ns: int | None = None
    """Clocks differ between hosts, so the time left is sent; ``request.deadline_ns`` is void."""
    generated: tuple[tuple[Natural, ...], ...] = ()
    """A resumed request: the tokens that the client has of each of its ``n`` sequences (empty = a fresh start)."""
    ended: tuple[Natural, ...] = ()
    """Indices of those sequences that have already ended."""
    decode_at: Peer | None = None
    """The instance to hand over to after the first token; ``None``: decode here."""
    transfer: TransferMode = TransferMode.BY_REQUEST_AGG
    holders: tuple[Holder, ...] = ()
    return_kv: bool = False
    """PD-Caching-3: the decode instance sends the generated KV back to the prefill instance."""
    told: tuple[TokenOutput, ...] = ()
    """A resumed request with a ``key``: all that its client was told."""
    span: Span | None = None
    """The request is a part of a sequence larger than an instance. None: it is all of it."""
    known_tokens: Natural | None = None
    """Tokens of prompts that wait there, as far as the router knows. An instance with many more answers that, and the
    router chooses again. None: it is to run the request however much waits."""


class Cancel(Message, frozen=True, tag=True):
    """End every sequence of the request; nothing waits for its output."""

    request_id: str


class StopSequence(Message, frozen=True, tag=True):
    """End one sequence: its stop string was found."""

    request_id: str
    index: Natural


class NoteTool(Message, frozen=True, tag=True):
    """The answer calls a tool, whose result its session waits for when it has ended."""

    request_id: str
    tool: str


class Tokens(Message, frozen=True, tag=True):
    """New outputs of requests, in order; one message a step."""

    outputs: tuple[TokenOutput, ...]


class QueryAttempts(Message, frozen=True, tag="AskAttempts"):
    """Which of these attempts do you not have? Messages keep their order: the question follows all earlier dispatches,
    the answer all outputs of an attempt. So an attempt that is unknown there never arrived, or its end was lost."""

    attempts: tuple[str, ...]
    dispatches: Natural
    """``Dispatch`` messages sent so far."""


class AttemptsUnknown(Message, frozen=True, tag=True):
    """The answer, with the question's ``dispatches``, and totals as in ``Load``."""

    attempts: tuple[str, ...]
    dispatches: Natural
    dispatches_heard: Natural
    answers_told: Natural


class HandedOver(Message, frozen=True, tag=True):
    """The decode instance has all that it needs: this request no longer depends on the sender."""

    request_id: str


class Migrate(Message, frozen=True, tag=True):
    """Let another instance go on with this request, and give it the KV: ``HandedOver`` comes from there."""

    request_id: str
    to: Peer
    copies_ahead: bool = True
    """The other instance caches KV: what is complete goes there while the request runs on."""


class MigrationRefused(Message, frozen=True, tag=True):
    """The request goes on where it is."""

    request_id: str
    reason: str


class RequestRefused(Message, frozen=True, tag=True):
    """The instance will not run the request. ``retry_after_s`` None: it can never run there."""

    request_id: str
    reason: str
    retry_after_s: float | None = None
    load: Load | None = None
    """Not None: others have placed so much there that its router had better choose again, with what it knows now."""


# -- adapters


class AdapterFiles(Message, frozen=True):
    """A LoRA adapter, as files."""

    name: str
    """By which clients ask for it."""
    folder: str
    """Where each instance reads it."""
    digest: str
    """Of the files' content: what is read must have it."""


class HoldAdapters(Message, frozen=True, tag=True):
    """Have these adapters, beside those of your start, and no others; answered by ``AdaptersHeld``. Repeated until all
    of them are there."""

    adapters: tuple[AdapterFiles, ...]


class AdaptersHeld(Message, frozen=True, tag=True):
    """The adapters that an instance has."""

    digests: tuple[str, ...]
    failed: tuple[tuple[str, str], ...] = ()
    """Digests of those that it cannot have, each with the reason."""


class NameAdapters(Message, frozen=True, tag=True):
    """Requests to a router that is not the owner may name these adapters; answered by ``AdaptersNamed``. Repeated while
    its answer is waited for."""

    adapters: tuple[AdapterFiles, ...]
    unnamed: tuple[str, ...]
    """Names of adapters of the start which they may name no more."""
    serial: Natural
    """A higher one with each change, of one owner."""


class AdaptersNamed(Message, frozen=True, tag=True):
    """A router that is not the owner has these names."""

    serial: Natural
    used: tuple[str, ...] = ()
    """Digests of the adapters that its requests have."""


# -- named prefixes


class Pin(Message, frozen=True, tag=True):
    """Keep the cached prefix of ``tokens`` from eviction for ``ttl_ns``, under a name. Repeated: renewed, extended."""

    handle: str
    tenant: str
    tokens: TokenArray
    ttl_ns: Natural
    priority: float | None = None
    """Retain it instead; a member of an older release pins it."""


class Pinned(Message, frozen=True, tag=True):
    """How much of the prefix is pinned."""

    handle: str
    tokens: Natural


class Unpin(Message, frozen=True, tag=True):
    """Give up the name of a pinned prefix."""

    handle: str


# -- transfers: instance <-> instance


class Offer(Message, frozen=True, tag=True):
    """Blocks that the receiver may pull until the lease ends. They need not be computed yet: ``Ready`` says when.

    ``blocks[i]`` holds tokens ``[(first_block + i) * block_tokens, ...)`` of ``tokens``; the last may be partly filled.
    """

    transfer_id: str
    """Unique in the cluster: owner's name, generation, number."""
    tenant: str
    tokens: TokenArray
    identity: bytes
    """Of the last whole block of ``tokens`` (b"" when there is none): namespace, key and tokens agree, or nothing is
    taken."""
    tier: Tier
    first_block: Natural
    blocks: tuple[Natural, ...]
    lease_ns: Natural
    mode: TransferMode = TransferMode.BY_REQUEST_AGG
    insert: bool = True
    """Insert into the receiver's index (``transfer_with_insert``)."""
    request: Request | None = None
    """A handoff: the receiver will decode this request."""
    deadline_in_ns: int | None = None
    return_kv: bool = False
    dst_blocks: tuple[Natural, ...] = ()
    """Where the receiver must put them (``transfer`` with ``dst``); empty = it allocates."""
    dst_tier: Tier = Tier.HBM
    private: bytes = b""
    """For the receiver's application, passed on unread; a store reads ``KEEP``."""
    dram_blocks: tuple[Natural, ...] = ()
    """Blocks that follow ``blocks`` and lie in the owner's DRAM (``blocks`` then lie in HBM)."""
    router: Peer | None = None
    """A handoff: the follower whose attempt it is. None: it is the owner's."""
    state_blocks: Natural = 0
    """So many blocks follow those of ``tokens``: the recurrent state behind them, where layers keep one. Of a handoff
    they come with ``MoreBlocks``."""
    part_blocks: Natural = 0
    """N: these are parts of windows, N blocks each, of the last blocks of ``tokens``. 0: a store is not told."""
    identities: Identities = b""
    """To or from one of several stores: of ``blocks`` and ``dram_blocks``, which need not be neighbours. Then there are
    no ``tokens``, and blocks are counted from the first of these."""
    migrates: bool = False
    """A handoff of a request that has decoded at the owner."""
    layers: tuple[Natural, Natural] | None = None
    """Of ``dst_blocks``, pages of layers ``[first, end)`` alone are brought; the others are there. None: of all."""
    before: Identities = b""
    """With ``identities``, to a store: of the blocks that lead to these and are its own as well."""
    part_of: str = ""
    """An attempt with ``Span.stripes`` that the receiver has as well: these are the blocks of a stripe, and go into
    those of its own sequence. ``tokens`` are those of the stripe. Empty: they are of no such attempt."""


class MoreBlocks(Message, frozen=True, tag=True):
    """The owner has got further HBM blocks for a handoff under way (``first_block`` counts from the prompt's
    start)."""

    transfer_id: str
    first_block: Natural
    blocks: tuple[Natural, ...]


class Wanted(Message, frozen=True, tag=True):
    """The receiver has the blocks before ``first_block`` already: those need no checksums."""

    transfer_id: str
    first_block: Natural


class Ready(Message, frozen=True, tag=True):
    """Layers ``[first_layer, end_layer)`` of blocks ``first_block`` and following are computed; a checksum each."""

    transfer_id: str
    first_block: Natural
    first_layer: Natural
    end_layer: Natural
    checksums: tuple[Checksum, ...]
    sealed_ns: Natural = 0
    """What computing these took: a part of what moving the pages costs."""


class Handoff(Message, frozen=True, tag=True):
    """The prefill is done: each sequence's first token (none for beams, whose choice is the receiver's)."""

    transfer_id: str
    first_tokens: tuple[tuple[Natural, ...], ...]
    """For each of the request's sequences the tokens known so far."""
    ended: tuple[Natural, ...] = ()
    """Sequences that ended with their first token."""
    told: tuple[TokenOutput, ...] = ()
    """A request with a ``key``: all that its client was told."""


class Withdraw(Message, frozen=True, tag=True):
    """The owner takes the offer back; nothing of it may be used any more."""

    transfer_id: str
    reason: str


class Release(Message, frozen=True, tag=True):
    """The receiver is done with the offer: the owner's references go back."""

    transfer_id: str
    used: bool = True
    """False: the receiver could not take the KV."""
    reason: str = ""


class Fetch(Message, frozen=True, tag=True):
    """Offer me blocks ``[first_block, end_block)`` of these tokens. Answered by ``Offer``, or by ``Withdraw``."""

    transfer_id: str
    tenant: str
    tokens: TokenArray
    first_block: Natural
    end_block: Natural
    deadline_in_ns: Natural = 0  # for how long the sender waits; 0: not said
    state_blocks: Natural = 0
    """Offer only what a recurrent state in so many blocks stands behind, and that as well. 0: KV alone is wanted."""
    part_blocks: Natural = 0
    """N: these are parts of a window, N blocks each, of the last blocks; a shorter prefix has no more parts than
    blocks."""
    identities: Identities = b""
    """Of one of several stores: offer me these, as far as all before them are there. Then there are no ``tokens``, and
    blocks are counted from the first of these."""
    is_trial: bool = False
    """The sender only looks how long it takes: the receiver may withdraw its offer whenever it needs the room."""


# -- remote memory: MemServe's Table 1 with an instance id


class Alloc(Message, frozen=True, tag=True):
    """Allocate blocks at the receiver, held for the sender until ``Free``, its end, or the lease's."""

    call_id: str
    count: Natural
    tier: Tier
    lease_ns: Natural


class Allocated(Message, frozen=True, tag=True):
    """The answer; ``None`` = no room."""

    call_id: str
    blocks: tuple[Natural, ...] | None


class Free(Message, frozen=True, tag=True):
    """Give back blocks from ``Alloc``."""

    call_id: str


AnyMessage: TypeAlias = (
    Join | JoinAccepted | RejoinRequest | Refused | PeerJoined | PeerGone | Expelled | Drain | Leave | Heartbeat
    | HeartbeatAck | Dispatch | Cancel | StopSequence | NoteTool | Tokens | QueryAttempts | AttemptsUnknown | HandedOver
    | Migrate | MigrationRefused
    | RequestRefused | Pin | Pinned | Unpin | KvEvents | KvSnapshot | QueryKvEvents | Offer | MoreBlocks | Wanted |
    Ready
    | Handoff | Withdraw | Release | Fetch | Alloc | Allocated | Free | SegmentHeld | JoinRequest | StoreMessage
    | AnswersHeld | QueryAnswers | AnswerTaken | AdmissionRequests | AdmissionGrants | KvHint | KvHintDone
    | HoldAdapters | AdaptersHeld | NameAdapters | AdaptersNamed
)  # fmt: skip
"""Every message that has a place of its own on the wire."""

KEEP = b"keep"
"""``Offer.private`` to a store: these blocks are pinned by name, and go to the disk without a second hit."""
