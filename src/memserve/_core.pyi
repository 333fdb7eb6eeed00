"""The native core (C++): block allocator, radix index, block identity, arenas and copy engine.

Wherever blocks or tokens go in, a buffer of int32 (numpy, ``array('i')``) or a :class:`BlockIds` is read in place, a
buffer of int64 is narrowed, and any other sequence of int is read item by item.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

class BlockIds(Sequence[int], Buffer):
    """An immutable run of int32 ids; ``numpy.asarray(ids)`` views it without a copy."""

    def __init__(self, ids: Sequence[int] = ...) -> None: ...
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> BlockIds: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def tolist(self) -> list[int]: ...

Ids = BlockIds | Sequence[int] | NDArray[np.int32]

class BlockAllocator:
    """Free and held blocks and loose pages of one arena; page ``p`` belongs to block ``p // pages_per_block``.

    A bad or free block raises :class:`memserve.base.errors.InvariantError`, names the block, and changes nothing.
    """

    def __init__(self, num_blocks: int, pages_per_block: int = 1) -> None: ...
    def allocate(self, count: int) -> BlockIds | None:
        """``count`` blocks, lowest ids first, one reference each; ``None`` = no room."""
    def retain(self, blocks: Ids) -> None:
        """One more reference each."""
    def release(self, blocks: Ids) -> int:
        """One reference less each; returns how many blocks became free."""
    def ref_count(self, block: int) -> int: ...
    def allocate_pages(self, count: int) -> BlockIds | None:
        """``count`` loose pages, from blocks that are broken already where possible; ``None`` = no room."""
    def release_pages(self, pages: Ids) -> int:
        """Give loose pages back; returns how many blocks are whole again."""
    @property
    def blocks_total(self) -> int: ...
    @property
    def blocks_free(self) -> int: ...
    @property
    def blocks_used(self) -> int:
        """Blocks with references (broken blocks not counted)."""
    @property
    def blocks_broken(self) -> int:
        """Blocks of which some pages are out."""
    @property
    def blocks_evictable(self) -> int:
        """Blocks that only an unpinned entry of the index refers to."""
    @property
    def pages_per_block(self) -> int: ...
    @property
    def pages_free(self) -> int: ...
    @property
    def pages_stranded(self) -> int:
        """Free pages in broken blocks: no request for a block can have them."""
    @property
    def pages_loose(self) -> int: ...
    def check_invariants(self) -> None: ...

class HoldCounts:
    """How many times the user of a pool holds each block; the allocator's counts include the index's references."""

    def __init__(self, num_blocks: int) -> None: ...
    @property
    def blocks_total(self) -> int: ...
    def take(self, blocks: Ids) -> None:
        """One hold more for each time that a block is named."""
    def give(self, blocks: Ids) -> int | None:
        """One hold less for each time that a block is named.

        ``None``: done. Otherwise nothing has changed, and the result is the first block that does not exist or is not
        held so many times.
        """

class Match:
    """A cached path."""

    @property
    def tokens(self) -> int: ...
    @property
    def pin(self) -> int: ...
    @property
    def hbm(self) -> BlockIds: ...
    @property
    def dram(self) -> BlockIds: ...

class Insertion:
    """What an insert did."""

    @property
    def added(self) -> int:
        """Blocks that the index took a reference on."""
    @property
    def pin(self) -> int: ...
    @property
    def adopted_dram(self) -> BlockIds:
        """DRAM blocks that the index gave up because the caller brought the same tokens in HBM."""

class Promotion:
    """What came up from DRAM."""

    @property
    def pin(self) -> int: ...
    @property
    def left_dram(self) -> BlockIds: ...

class Eviction:
    """What left the index or moved down inside it, in order; the index's references are dropped already."""

    @property
    def freed(self) -> int: ...
    @property
    def changes(self) -> list[tuple[int, int, int]]:
        """``(kind, from, to)``: kind 0 = dropped from HBM, 1 = dropped from DRAM, 2 = HBM to DRAM."""
    @property
    def moved_from(self) -> BlockIds: ...
    @property
    def moved_to(self) -> BlockIds: ...
    @property
    def dropped_hbm(self) -> BlockIds: ...
    @property
    def dropped_dram(self) -> BlockIds: ...
    @property
    def ended_holds(self) -> list[int]:
        """Holds on paths that are not whole any more."""

class RadixIndex:
    """Radix tree over whole blocks of tokens, one root a namespace (16 bytes).

    With allocators, the index holds one reference on each block that it names; without, block ids mean nothing to it.
    """

    def __init__(
        self,
        block_tokens: int,
        hbm: BlockAllocator | None = None,
        dram: BlockAllocator | None = None,
        hash_seed: int = 0,
    ) -> None: ...
    def match(self, namespace: bytes, tokens: Ids) -> int:
        """Cached prefix in tokens (whole blocks). Changes nothing."""
    def match_blocks(self, namespace: bytes, tokens: Ids) -> Match:
        """The cached prefix with its blocks. Changes nothing."""
    def continuation(self, namespace: bytes, tokens: Ids, count: int) -> list[int]:
        """Up to ``count`` tokens that lie behind ``tokens`` (any number) in the tree, as far as one edge goes. Empty:
        not all of ``tokens`` are in it, or nothing follows. Changes nothing."""
    def acquire(self, namespace: bytes, tokens: Ids) -> Match:
        """As ``match_blocks``, pinned (``pin``, 0 = nothing), with a reference on each HBM block for the caller."""
    def unpin(self, pin: int) -> None:
        """End a pin (0 = nothing); its path becomes the most recently used."""
    def hold(self, namespace: bytes, tokens: Ids) -> int:
        """Keep ``evict`` from the whole blocks of ``tokens`` on either tier, until ``unhold``, ``delete`` or ``clear``;
        they count as evictable all the same. 0: not all of them are cached."""
    def unhold(self, hold: int, tier: int) -> None:
        """End a hold on a tier: the path is evicted when its last use says, as if it had not been held. Raises where it
        has been deleted or cleared."""
    def is_held(self, hold: int, tier: int) -> bool:
        """Whether this hold stands on the tier."""
    def make_oldest(self, namespace: bytes, tokens: Ids) -> int:
        """What only ``tokens`` (whole blocks) leads to, with the one path that may go on behind them, is the next that
        ``evict`` takes of its owner from either tier, as far as it is neither pinned nor held. Returns its blocks; 0
        also where several paths go on behind ``tokens``, or not all of them are cached."""
    def demote(self, namespace: bytes, tokens: Ids) -> Eviction:
        """The same path leaves HBM for DRAM, as far as that has room or others make it; what is held in DRAM, too. That
        is a use of it."""
    def set_demotes_held_only(self) -> None:
        """From now on ``evict`` moves down from HBM only what is held in DRAM, drops the rest, and frees fewer than it
        was asked for where the former find no room in DRAM."""
    def insert(
        self,
        namespace: bytes,
        tokens: Ids,
        blocks: Ids,
        hbm_blocks: int = -1,
        pin: bool = False,
        owner: bytes = b"",
    ) -> Insertion:
        """Add the whole blocks of ``tokens``; the first ``hbm_blocks`` of ``blocks`` lie in HBM (-1 = all).

        ``owner`` (16 bytes; b"" is an owner too): of a namespace that has nothing in the index yet. Eviction is fair
        between owners.
        """
    def promote(self, pin: int, hbm_blocks: Ids) -> Promotion:
        """The pinned path's first DRAM blocks move to ``hbm_blocks``; the pin moves to the end of HBM."""
    def evictable(self, tier: int) -> bool:
        """Whether ``evict`` finds anything."""
    def evictable_blocks(self, tier: int, at_most: int) -> int:
        """How many blocks of the tier are neither pinned nor held; not counted further than to ``at_most``."""
    def evict(self, tier: int, count: int) -> Eviction:
        """Free ``count`` blocks of a tier (HBM: moved down to DRAM where it has room) that nothing holds.

        Oldest leaves first, of the owner with the heaviest blocks (``src/core/radix/index.h``): they count double for
        each turnover of the tier that the owner has not used the index for.
        """
    def delete(self, namespace: bytes, tokens: Ids) -> Eviction:
        """Remove what only ``tokens`` leads to.

        That is: every unpinned entry that extends ``tokens``, then the blocks of ``tokens`` from the end upwards, as
        far as they are unpinned and lead nowhere else. Nothing, when ``tokens`` is not cached in full.
        """
    def clear(self) -> Eviction:
        """Drop everything that is not pinned, held or not."""
    def burden(self, owner: bytes, tier: int, beside: int = 0) -> int:
        """How heavy an owner's blocks are, with ``beside`` more of them: see ``evict``. 0: it is not known."""
    def blocks(self, tier: int) -> int: ...
    def blocks_pinned(self, tier: int) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def nodes(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Bytes of nodes, tokens, block ids and hash table."""
    def check_invariants(self) -> None: ...

def siphash128(key: bytes, data: bytes) -> bytes:
    """SipHash-2-4 with 128-bit output; ``key`` is 16 bytes."""

def block_identities(key: bytes, namespace: bytes, tokens: Ids, block_tokens: int) -> bytes:
    """16 bytes a whole block: ``identity[i] = siphash128(key, identity[i-1] + tokens of block i)``."""

def fits_vocabulary(tokens: Ids, vocab_size: int) -> bool:
    """Whether each of ``tokens`` is in ``[0, vocab_size)``; ``vocab_size`` is less than 2 ** 32."""

def raise_registers(
    registers: NDArray[np.uint8], identities: bytes, counted: int, total: float, chance: float
) -> tuple[float, float, float]:
    """Add 16-byte ``identities`` to the sketch of :mod:`memserve.router.placement.reuse_ceiling`; ``total`` and
    ``chance`` are its estimate and its probability. Returns both as they are now, and the estimate of how many of the
    first ``counted`` identities are new. The number of ``registers`` is a power of two."""

def value_keys(secret: bytes, scope: bytes, keys: list[bytes]) -> bytes:
    """16 bytes a key: ``siphash128(secret, scope's length as 8 bytes, little-endian, + scope + key)``."""

class Arena(Buffer):
    """Zeroed anonymous memory on huge pages, touched lazily: ``numpy.frombuffer(arena, dtype=numpy.uint8)``."""

    def __init__(self, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class LowerPages:
    """Converts pages of KV to codes of a byte or less, and back: see ``src/core/pool/lower_pages.h``."""

    def __init__(
        self, kv_heads: int, head_dim_k: int, head_dim_v: int, block_tokens: int, dtype: str, lower_dtype: str
    ) -> None:
        """``dtype`` is the KV's, ``lower_dtype`` ``int8``, ``fp8`` (e4m3) or ``int4``. Raises :class:`ValueError`, also
        for heads of more than 1,024 elements."""

    @property
    def page_bytes(self) -> int: ...
    @property
    def lower_page_bytes(self) -> int:
        """Bytes of a page in the lower tier: a multiple of 64."""

    def down(self, dst_address: int, src_address: int, src_ids: Ids, dst_ids: Ids, threads: int = 1) -> None:
        """Write pages ``src_ids[i]`` of the arena at ``src_address`` as lower pages ``dst_ids[i]``, without the GIL, by
        up to ``threads`` threads. Addresses are trusted; pages must not overlap."""

    def up(self, dst_address: int, src_address: int, src_ids: Ids, dst_ids: Ids, threads: int = 1) -> None:
        """The other direction: ``src_ids`` are lower pages. :meth:`down` makes the same bytes of what this writes."""

def copy_blocks(
    dst_address: int,
    src_address: int,
    block_bytes: int,
    src_ids: Ids | None,
    dst_ids: Ids | None,
    threads: int = 1,
) -> None:
    """Copy blocks ``src_ids[i] -> dst_ids[i]`` between two arenas, without the GIL, by up to ``threads`` threads.

    ``dst_ids`` None gathers into contiguous memory, ``src_ids`` None scatters from it. Addresses are trusted; blocks
    must not overlap.
    """

def copy_bytes(dst_address: int, src_address: int, count: int, threads: int = 1) -> None:
    """Copy ``count`` bytes that do not overlap, without the GIL."""

class SharedArena(Buffer):
    """Zeroed memory, touched lazily, that other processes of this host can read: ``PeerArena(pid, fd, nbytes)``.

    An unnamed file in memory (memfd), sealed against changes of its size and against other writers; that of a
    :class:`MemoryTier` has a name. ``OSError`` when the kernel has none to give.
    """

    def __init__(self, nbytes: int, sealed: bool = True) -> None:
        """``sealed``: false lets processes that inherit ``fd`` map it writable, until :meth:`seal`."""
    @staticmethod
    def attach(fd: int, nbytes: int) -> SharedArena:
        """A worker's map of its instance's arena, writable; takes ``fd`` over."""
    def seal(self) -> None:
        """No process can map it writable from now on."""
    @property
    def fd(self) -> int:
        """The owner's descriptor of the file, closed when this object goes."""
    @property
    def address(self) -> int:
        """Where the bytes begin: on a page of 4 KiB, one behind the file's header."""
    @property
    def nbytes(self) -> int: ...
    @property
    def generation(self) -> int:
        """What peers read to tell this owner from an earlier one with its pid; 0 at first, below 2**64."""
    @generation.setter
    def generation(self, generation: int) -> None: ...
    def collapse(self, offset: int, count: int) -> int:
        """Commit ``[offset, offset + count)`` and put it on huge pages; returns the bytes that lie on them now.

        Without the GIL, about a millisecond for 2 MiB, while others read and write. 0: the kernel cannot (before
        Linux 6.1), or shared memory may have none.
        """
    def __buffer__(self, flags: int, /) -> memoryview: ...

class PeerArena(Buffer):
    """A read-only map of another process's :class:`SharedArena`; it outlives its owner.

    ``OSError`` when the owner is gone, when it belongs to another user, or when its descriptor is not an arena of
    ``nbytes`` (any more).
    """

    def __init__(self, pid: int, fd: int, nbytes: int) -> None: ...
    def forget(self) -> None:
        """Let go of the pages read so far: they no longer count as resident in this process. Reading finds them again,
        also at this very moment."""
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def generation(self) -> int:
        """The owner's, as it is now."""
    def __buffer__(self, flags: int, /) -> memoryview: ...

Offsets = NDArray[np.int64]
"""Byte offsets ``[n]`` from a base address, none negative, C-contiguous."""

def seal_ranges(base: int, offsets: Offsets, range_bytes: int, threads: int = 1) -> NDArray[np.uint64]:
    """The 64-bit checksum of each of ``n`` ranges of ``range_bytes``, without the GIL, by up to ``threads`` threads.

    Equal on every machine; not keyed: it finds damage, not forgery. ``ValueError``: a negative offset, an empty range.
    Addresses are trusted.
    """

def copy_ranges_sealed(
    dst_base: int,
    dst_offsets: Offsets,
    src_base: int,
    src_offsets: Offsets,
    range_bytes: int,
    threads: int = 1,
) -> NDArray[np.uint64]:
    """Copy range ``i`` from ``src_offsets[i]`` to ``dst_offsets[i]`` and return the checksums of what was written.

    Each byte is read once: the checksum is of the copy, even if the owner writes meanwhile. Ranges must not overlap.
    """

KV_CODEC_VERSION: int
"""Of the encoding of KV; decoding refuses others."""

def kv_encoded_bytes_max(range_bytes: int, ranges: int = 1) -> int:
    """The memory that :func:`kv_encode_ranges` needs for ``ranges`` ranges of ``range_bytes``."""

def kv_encode_ranges(
    base: int, offsets: Offsets, range_bytes: int, floats: str | None, out: int, out_bytes: int
) -> int:
    """Encode each of ``n`` ranges of floats, one behind the other at ``out``, without the GIL; returns their bytes.

    0: at least one does not become shorter by a thirty-second. ``floats``: ``bfloat16``, ``float16`` or ``float32``;
    None: found by a sample of the first range. Any bytes of any length come back the same. ``ValueError``: too little
    memory at ``out``, a negative offset, an empty range. Addresses are trusted.
    """

def kv_decode_ranges(
    src: int, src_bytes: int, base: int, offsets: Offsets, range_bytes: int
) -> NDArray[np.uint64] | None:
    """Decode ``n`` ranges that lie one behind the other at ``src``; returns the checksums (:func:`seal_ranges`) of
    what was written. None: they are damaged; the ranges may be written in part.

    Whatever the ``src_bytes`` bytes are, nothing else is read, and nothing but the ranges written. Bytes behind the
    last encoding are not looked at.
    """

def detect_floats(base: int, range_bytes: int) -> str | None:
    """What the floats of a range are, by which encoding would be shortest; None: none becomes shorter."""

def kv_codec_isas() -> list[str]:
    """Instruction sets that the codec has code for here, the one in use last."""

def force_kv_codec_isa(name: str | None) -> None:
    """Use one of :func:`kv_codec_isas` from now on (``None``: the best), for tests. All write the same bytes."""

def seal_isas() -> list[str]:
    """Instruction sets that checksums can be computed with here, the one in use last."""

def force_seal_isa(name: str | None) -> None:
    """Use one of :func:`seal_isas` from now on (``None``: the best), for tests. All give equal checksums."""

class PrefixDirectory:
    """Which instance holds which block, on which tier: the global prompt trees of a cluster, all matched at once.

    Holders are ints in ``[0, 65536)``, better small: a bit each. Tiers are 0 (HBM) and 1 (DRAM). ``identities`` are 16
    bytes a block, see :func:`block_identities`. A holder has a number of references a tier on a block, as in streams
    that store a block once a copy; or it has the block speculatively. ``ValueError``: other holders, tiers, lengths.
    """

    def __init__(self) -> None: ...
    def store(self, holder: int, tier: int, identities: bytes) -> None:
        """One reference more on each. What was speculative is real now."""
    def move(self, holder: int, tier: int, identities: bytes) -> int:
        """Of each, one reference goes to ``tier`` from the other one; returns for how many there was none.

        Such a block counts as stored on ``tier``, unless it is there already.
        """
    def evict(self, holder: int, identities: bytes, tier: int | None = None) -> int:
        """One reference less on each, of ``tier`` (``None``: DRAM before HBM); returns how many had none.

        What is speculative stays so.
        """
    def clear(self, holder: int) -> None:
        """It has nothing any more, speculative or not."""
    def speculate(self, holder: int, identities: bytes, expires_ns: int) -> None:
        """It will have these soon: until then they count as if in its HBM. What it holds stays as it is.

        Of two promises the one that ends later counts.
        """
    def expire(self, now_ns: int) -> int:
        """Forget what is speculative with ``expires_ns <= now_ns``; returns how many blocks that were."""
    def match(self, identities: bytes) -> list[tuple[int, int, int]]:
        """``(holder, blocks, dram_blocks)`` for each holder of the first block, by holder.

        ``blocks``: from the first one without a gap; ``dram_blocks`` of them lie in DRAM alone.
        """
    def match_array(self, identities: bytes) -> NDArray[np.int32]:
        """The same as rows of an array ``[holders, 3]``: a tenth of the time where there are a thousand."""
    def match_columns(self, identities: bytes, numbers: int) -> tuple[NDArray[np.int64], int]:
        """The same as ``[2, numbers]``, blocks and DRAM blocks by holder; and how many have any of it.

        ``ValueError``: a holder's number is not below ``numbers``.
        """
    def locate(self, identities: bytes, holders: Sequence[int]) -> bytes:
        """For each block a byte a holder: 0, not there; 1, on the upper tier; 2, on the lower one alone. What is only
        expected is not there."""
    def match_tokens(self, key: bytes, namespace: bytes, tokens: Ids, block_tokens: int) -> list[tuple[int, int, int]]:
        """``match(block_identities(key, namespace, tokens, block_tokens))``, hashing no further than it must."""
    def match_tokens_array(self, key: bytes, namespace: bytes, tokens: Ids, block_tokens: int) -> NDArray[np.int32]:
        """The same as rows of an array ``[holders, 3]``."""
    def holders(self) -> list[int]:
        """Those that have anything, in order."""
    def blocks(self, holder: int) -> int:
        """How many it holds, speculative ones not counted."""
    def speculative_blocks(self, holder: int) -> int: ...
    def dump(self, holder: int) -> list[tuple[bytes, int, int]]:
        """``(identity, references in HBM, in DRAM)`` of each of its blocks, by identity; speculative: none in both."""
    @property
    def entries(self) -> int:
        """Blocks that anybody has."""
    @property
    def nbytes(self) -> int: ...
    @property
    def next_expiry_ns(self) -> int | None:
        """When the next speculative block is due."""
    def check_invariants(self) -> None: ...

_LoadRow = tuple[int, int, int, int, int, int, int, int]

def shortlist(
    crowd: Sequence[NDArray[np.int64]],
    loads: NDArray[np.int64],
    room: NDArray[np.int64],
    matches: NDArray[np.int64],
    favourites: Sequence[int],
    respects: Sequence[int],
    overload: tuple[int, int],
    all_of: int,
) -> list[_LoadRow]:
    """Of very many instances the few worth a look, each once: ``(number, queue, sequences, context, room, context that
    does not run yet, matched, matched in DRAM)``.

    ``crowd``: for each role the numbers of its instances, in order. ``loads``: ``[3, 3, n]``, of each
    instance what was sent there, what it reported, and what was sent since, each of them tokens queued, sequences,
    tokens of their contexts; what it has is the first, or the sum of the others if that is more. ``room``: ``[n]``.
    ``matches``: ``[2, n]``, from :meth:`PrefixDirectory.match_columns`.

    Of each role these are ``respects``, the first of equals: 0, the least work, which is queue and contexts; 1, the
    longest match, of equal ones the least work; 2, that among those with no more work than ``overload``, a factor and a
    summand on the crowd's least (there is none: 0). Then the ``favourites`` that are of that role. When no role has
    more than ``all_of``, all of them are given. ``ValueError``: a role without numbers, or such as have no column.
    """

class RoutingPrices:
    """Curves of ``policy.costs.CostModel``, each in three coefficients, in ns: a table of profiles."""

    def __init__(self, profiles: Sequence[Sequence[tuple[float, float, float]]]) -> None:
        """Each profile: ``prefill, decode, swap_in, same_host, network, disk``."""

def cheapest(
    first: Sequence[tuple[NDArray[np.int64], bool]],
    decoders: Sequence[NDArray[np.int64]],
    loads: NDArray[np.int64],
    room: NDArray[np.int64],
    matches: NDArray[np.int64],
    hosts: NDArray[np.int64],
    favourites: Sequence[int],
    prices: RoutingPrices,
    profiles: NDArray[np.int64],
    ask: tuple[int, int, int, int, int, int, int],
    holding: tuple[int, int, int],
    window_steps: int,
) -> tuple[_LoadRow, _LoadRow | None, int]:
    """Of all pairs of one of ``first`` and one of ``decoders`` the one that ``policy.routing.cost`` would choose, in
    rows as :func:`shortlist` gives them. Those of ``first`` whose flag is set decode themselves: the second is None.
    Third: the shortest time (ns) in which any of ``first`` computes what it lacks of the prompt.

    ``loads``, ``room`` and ``matches`` as there; ``hosts``: ``[n]``, a code up to ``n`` for each, 0: unknown.
    ``profiles``: ``[n]``, the place in ``prices`` of each. ``ask``: tokens of the prompt, tokens at most to be
    generated, sequences, bytes of KV a token, tokens a block, pieces of a block in a handoff, blocks of a recurrent
    state that goes with KV. ``holding``: the number of an instance or a store that may be asked for a prefix, for how
    many tokens of it (0: none), and how many of them lie on the disks of a store, read at its own price.
    ``window_steps``: decode steps that count. ``ValueError``: no instances to choose from, or numbers without a column.
    """

def fit_curve(features: NDArray[np.float64], times_ns: NDArray[np.float64]) -> tuple[float, float, float]:
    """The coefficients of a curve of ``kv.costs``, none negative, that bring ``features @ coefficients`` closest to the
    times, in squares of the relative error, outliers weighing less. ``features``: ``[n, 3]``; ``times_ns``: ``[n]``,
    above 0. Of features that are alike all or the first have what they cost. ``ValueError``: not as many times as
    rows."""

def most_of(
    matches: NDArray[np.int64], codes: NDArray[np.int8], without: int, stores: int, count: int
) -> list[tuple[int, int, int]]:
    """The holders of most of a prompt: up to ``count`` times ``(number, blocks, those in its lower tier alone)``.

    Most blocks first, then those in an instance's HBM alone, in its HBM and DRAM, in the DRAM of a store (``codes`` say
    ``stores``), and with some on its disks; then the lowest number. ``matches``: ``[2, n]``, from
    :meth:`PrefixDirectory.match_columns`; whose ``codes`` (``[n]``) say ``without`` are left out.
    """

class SequenceRow:
    """The fields of ``instance.sequence.Sequence`` that the loops below read and write; what they mean is said there.

    Plain attributes: objects are missing until they are set, numbers (int64) are 0.
    """

    phase: Any
    out: list[int]
    draw: tuple[int, ...]
    stops: frozenset[int]
    prompt_tokens: int
    computed: int
    inflight: int
    left: int
    scheduled_step: int
    writable_until: int

_Row = TypeVar("_Row", bound=SequenceRow)

def out_of_room(sequences: list[_Row]) -> list[_Row]:
    """Those that may not write the next token (``computed >= writable_until``), in order."""

def plan_decodes(sequences: list[_Row], step_id: int) -> tuple[list[int], list[int], list[tuple[int, ...]], list[_Row]]:
    """A row of plan ``step_id`` for each: it computes a token and draws one. Returns their starts, slots and draws, and
    those with none ``left``. ``ValueError``, and nothing changed: one does not draw for exactly one slot.
    """

def take_tokens(sequences: list[_Row], tokens: list[int], decoding: object, finished: object) -> list[int]:
    """Each sequence that is not in the phase ``finished`` gets its token, which is under way no more. Returns the
    places of those that do more than draw on, in order: they have their first token, or one of their ``stops``, or
    another phase than ``decoding``.
    """

def count_tokens(sequences: list[_Row]) -> tuple[int, int]:
    """Their tokens, those under way included; and how many of the known ones are not computed."""

class StopStrings:
    """All stop strings of a request as one automaton over their UTF-8, immutable: 20 bytes for each of theirs.
    ``ValueError``: one is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None: ...
    def __len__(self) -> int:
        """Nodes: distinct beginnings of stop strings, the empty one included."""

class StopFinder:
    """Finds the stop strings in the text of one sequence, which comes in pieces. A piece costs O(its own length)."""

    def __init__(self, stops: StopStrings) -> None: ...
    def push(self, text: str) -> str:
        """What may be shown now of all text so far. After a match: the text before it, then nothing."""

    def finish(self) -> str:
        """The held end of the text: what comes later completes no stop string that began in it."""

    @property
    def found(self) -> bool: ...
    @property
    def steps(self) -> int:
        """Edges of the automaton that were tried: at most two for each byte of the text."""

class JsonShape:
    """What :func:`json_shape` counted."""

    @property
    def values(self) -> int:
        """Values in arrays and objects (names are not counted), and the outermost one."""

    @property
    def containers(self) -> int:
        """Arrays and objects."""

    @property
    def depth(self) -> int:
        """Most arrays and objects in one another."""

    @property
    def name_bytes(self) -> int:
        """Bytes of the longest name, as written."""

def warn_of_leaks(warns: bool) -> None:
    """Whether a process that ends with objects of the native modules alive lists them on stderr. Off at first: only
    the search for a leak needs it."""

def json_shape(text: bytes) -> JsonShape:
    """How much a parser would have to build for ``text``: never less than it does. Linear in the text, of which more
    than 64 KiB are read without the GIL. What is no JSON is counted as if it were, and is for the parser to refuse.
    """

def json_cut_ids(text: bytes, name: str) -> tuple[bytes, bytes] | None:
    """``text``, a JSON object, with ``null`` in the place of its field ``name``, and the integers of that field as
    int32, one behind the other. None: the field is anything but one array of one integer or more, written plainly and
    each in ``[0, 2 ** 31)``. The rest of ``text`` is not checked. More than 64 KiB are read without the GIL.
    """

class Ticket:
    """Room for a record: ``pages`` pages of 4 KiB from byte ``offset`` of the disk on, the head's included."""

    @property
    def id(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def pages(self) -> int: ...

class Found:
    """A record that was found. Offsets are bytes from the disk's start; that of a short payload is no whole page."""

    @property
    def offset(self) -> int: ...
    @property
    def head_offset(self) -> int: ...
    @property
    def length(self) -> int:
        """Bytes of the payload."""
    @property
    def encoded_bytes(self) -> int:
        """Whole pages in which its encoding lies; 0: it is as it is."""
    @property
    def segment(self) -> int:
        """For :meth:`SegmentLog.let_go`."""
    @property
    def seal(self) -> int:
        """As :func:`seal_ranges` gives it for the payload; 0: it is empty."""
    @property
    def scope(self) -> int: ...
    @property
    def name_bytes(self) -> int:
        """Of the record's name."""

Source = int | Callable[[int, int], bytes | None]
"""A disk to recover from: a file descriptor, or ``read(offset, count)``, which gives None for what cannot be read."""

class SegmentLog:
    """Where records lie on one disk, and when their space is written again: bookkeeping alone, no IO.

    The host performs what :meth:`take_commands` gives and tells each end, in any order. Keys have 16 bytes. A record
    is found once it is written, and, with ``sync`` 2, synced. ``ValueError``: sizes that no segment has.
    """

    FORMAT_VERSION: int
    """The highest version of a superblock that is read."""
    HEAD_BYTES: int
    """Bytes in front of a record's name; a short payload stands right behind the name, in the same page."""

    def __init__(
        self, segments: int, segment_bytes: int, secret: bytes, move_share: float = 0.25, sync: int = 1
    ) -> None:
        """``secret``: 16 bytes that only this disk's superblock knows. ``move_share``: how much of a segment is written
        again, when its space is needed, because it was hit. ``sync``: 0 never, 1 each segment, 2 each record."""
    @staticmethod
    def read_superblock(source: Source) -> tuple[int, int, bytes] | None:
        """``(segments, segment_bytes, secret)`` of a disk; None: nothing of ours is on it."""
    @staticmethod
    def superblock_version(source: Source) -> int:
        """The version that a disk of ours has, known here or not; 0: nothing of ours is on it."""
    @staticmethod
    def saves_pages(length: int, encoded_bytes: int) -> bool:
        """Whether an encoding of a value of ``length`` bytes takes fewer pages than the value."""
    def expect_encoded(self) -> None:
        """Encoded payloads are to come: the superblock has to say so first."""
    @property
    def takes_encoded(self) -> bool:
        """Whether it does, in both copies."""
    def format(self) -> None:
        """Begin on a disk that nothing was on."""
    def recover(self, source: Source) -> None:
        """Begin with what an earlier life left. ``ValueError``: the disk is another log's."""
    def place(
        self, key: bytes, length: int, name: bytes = b"", scope: int = 0, seal: int = 0, encoded_bytes: int = 0
    ) -> Ticket | None:
        """Room for a record; None: no segment is ready. The host writes :meth:`head` and the payload behind it.

        ``encoded_bytes``: of the payload as it is written; 0: as it is. ``ValueError``: these save no page, or
        :attr:`takes_encoded` is False."""
    def place_moved(self, command: int, name: bytes = b"") -> Ticket | None:
        """Room for a record that has to move; None: it is gone meanwhile, or there is no room."""
    def head(self, ticket: int, name: bytes = b"", payload: bytes = b"") -> bytes:
        """The record's first page. A payload that has room in it, ``pages == 1``, is given here."""
    def read_head(self, page: bytes) -> tuple[bytes, int, int, bytes, int] | None:
        """``(key, length, scope, name, seal)`` of a page that begins a record of this disk."""
    def finish_record(self, ticket: int, written: bool) -> None: ...
    def hold(self, key: bytes, counts: bool = True) -> Found | None:
        """Find a record; its bytes stay where they are until :meth:`let_go`. ``counts``: this is a hit."""
    def let_go(self, segment: int) -> None: ...
    def look(self, key: bytes) -> Found | None:
        """What is known of a record: no hit, and nothing is held."""
    def touch(self, keys: bytes) -> None:
        """A hit of each of those that are here."""
    def __contains__(self, key: bytes) -> bool: ...
    def __len__(self) -> int: ...
    def keys(self) -> bytes:
        """All of them, one behind the other, in no order."""
    def remove(self, key: bytes) -> bool:
        """False: there is no such record. A restart knows of it, and of what was evicted by now, once
        :attr:`removals_written`."""
    def purge(self) -> None:
        """Forget everything."""
    def take_commands(self) -> list[tuple[int, int, int, bytes]]:
        """``(id, kind, offset, data)``: 0 write these pages, 1 sync, 2 move the record with this key."""
    def finish_command(self, command: int, done: bool) -> None: ...
    def close_open(self) -> None:
        """Write the footer of the open segment now, so that a restart need not read all of it."""
    def take_ended(self) -> list[tuple[int, bool]]:
        """Tickets that came to their end, and whether their record is found now."""
    def take_evicted(self) -> bytes:
        """Keys, one behind the other, that are found no longer because their space was needed, or all was purged."""
    def counters(self) -> dict[str, int]: ...
    def check_invariants(self) -> None: ...
    @property
    def record_bytes_max(self) -> int: ...
    @property
    def disk_bytes(self) -> int: ...
    @property
    def segments_free(self) -> int: ...
    @property
    def idle(self) -> bool:
        """Nothing is under way."""
    @property
    def removals_written(self) -> bool: ...
    @property
    def broken(self) -> bool:
        """The disk has failed eight commands in a row: nothing more is written."""
    @property
    def nbytes(self) -> int:
        """Memory of index and segments."""

class Place:
    """Where a value lies in a :class:`MemoryTier`."""

    @property
    def offset(self) -> int:
        """Bytes from the arena's start."""
    @property
    def length(self) -> int: ...
    @property
    def scope(self) -> int: ...
    @property
    def seal(self) -> int: ...
    @property
    def verified(self) -> bool:
        """False: an earlier owner published it, and its bytes were not compared with its seal since."""
    @property
    def name(self) -> bytes: ...

class MemoryTier:
    """Values in one arena by key of 16 bytes; other processes of the host read them in place (:class:`TierReader`).

    Bookkeeping: the caller writes the bytes of values, before it publishes them. An extent is freed when nothing refers
    to it: not the callers of ``allocate``, ``retain`` and ``find``, not the table, not a client's pin. A reference too
    many given back: :class:`memserve.base.errors.InvariantError`, and nothing has changed. One thread uses it.
    """

    def __init__(
        self, arena_bytes: int, block_bytes: int, *, name: str = "", entries: int = 0, secret: bytes = b""
    ) -> None:
        """``name`` empty: private, ``arena`` is None, no memory but the bookkeeping's. Else two files in ``/dev/shm``
        for this user alone; values that an earlier owner of this name and these sizes published are here again, not
        ``verified``. ``entries``: how many keys the table shows, those on disk included, and the most values that are
        kept; 0: from the sizes. ``secret``: by which its tables hash, 16 bytes; empty: drawn, so that no
        client can choose keys that meet. ``OSError``: the name has an owner, or ``/dev/shm`` too little room."""
    @property
    def arena(self) -> SharedArena | None:
        """What peers read by its descriptor as well; its ``generation`` is the caller's to set."""
    def allocate(self, length: int) -> int | None:
        """The offset of an extent for ``length`` bytes, that of the name included, with one reference. Evicts for it;
        None: no room."""
    def allocate_blocks(self, count: int) -> BlockIds | None:
        """``count`` extents of ``block_bytes`` at ``number * block_bytes``, one reference each, or None."""
    def retain(self, offset: int) -> None:
        """One reference more on the extent that begins there."""
    def release(self, offset: int) -> None: ...
    def retain_blocks(self, blocks: Ids) -> None: ...
    def release_blocks(self, blocks: Ids) -> None: ...
    def ref_count(self, offset: int) -> int:
        """The table's included; 0: no extent begins there."""
    def publish(
        self, key: bytes, offset: int, length: int, *, scope: int = 0, seal: int = 0, name: bytes = b""
    ) -> bool:
        """From now on the extent is found by this key; the table takes a reference of its own. False: the key is here
        already, nothing has changed. ``name``, at most 1,024 bytes, is written behind the value; readers compare it.
        ``scope``: 32 bits, ``seal``: 64 bits, as the caller has them. ``InvariantError``: value and name exceed the
        extent, or it had a key before (its bytes stay as they are until it is free)."""
    def find(self, key: bytes, *, counts: bool = True) -> Place | None:
        """With one reference more, to be released. ``counts``: this is a hit."""
    def verified(self, key: bytes) -> None:
        """The bytes of an adopted value agree with its seal: clients may read it."""
    def __contains__(self, key: bytes) -> bool: ...
    def __len__(self) -> int: ...
    def prefix(self, keys: bytes) -> int:
        """How many of the keys, from the first on, are in memory."""
    def touch(self, keys: bytes, hit: bool) -> None:
        """Values that lead to one another, the first one to all, were used just now: the last one leaves memory first.
        ``hit``: not for the first time. No hit is counted."""
    def keys(self) -> bytes: ...
    def remove(self, key: bytes) -> bool:
        """The value is found no longer; False: it was not here. Its bytes stay for those that refer to it."""
    def purge(self) -> None:
        """Remove everything in memory; what is said of the disk stays."""
    def mark_on_disk(self, key: bytes, here: bool) -> None:
        """What clients are told; after a start nothing is marked. As far as the table has room."""
    def take_evicted(self) -> list[bytes]:
        """Keys that left memory to make room, since the last call."""
    def open_client(self, number: int) -> str:
        """The path of a new client's area. ``ValueError``: the number is in use, or the tier is private."""
    def close_client(self, number: int) -> None:
        """Its pins end, and its :class:`TierReader` says so. ``ValueError``: no such client."""
    def unlink(self) -> None:
        """At an orderly end: the files go, and clients' areas; nothing is left to be adopted."""
    def counters(self) -> dict[str, int]:
        """``published, removed, evicted, hits, misses, client_hits, adopted, refused`` (no room), ``hidden`` (not shown
        to clients: the table was full) since the start; ``limbo`` (removed, but still read), ``clients`` now."""
    def check_invariants(self) -> None: ...
    @property
    def data_path(self) -> str: ...
    @property
    def index_path(self) -> str: ...
    @property
    def adopted(self) -> bool:
        """An earlier owner's files were taken over."""
    @property
    def block_bytes(self) -> int: ...
    @property
    def unit_bytes(self) -> int:
        """Extents are whole units, but for small values that share one: 4096 bytes, or ``block_bytes`` where that is no
        multiple of it."""
    @property
    def blocks_total(self) -> int: ...
    @property
    def blocks_free(self) -> int:
        """Blocks of which every unit is free."""
    @property
    def blocks_evictable(self) -> int:
        """Blocks in the place of a block to which only the table refers. Clients may have pinned some of them."""
    @property
    def bytes_free(self) -> int: ...
    @property
    def bytes_used(self) -> int: ...
    @property
    def bytes_evictable(self) -> int:
        """Of extents to which only the table refers."""
    @property
    def entries(self) -> int: ...
    @property
    def entries_used(self) -> int:
        """Values in memory."""
    @property
    def places_used(self) -> int:
        """Keys that the shared table shows, those on disk alone included."""
    @property
    def nbytes(self) -> int:
        """Private memory of the bookkeeping."""

class TierReader:
    """Reads a :class:`MemoryTier` of another process of this host and user, in place. Any number of threads.

    ``OSError``: these are no files of a store, or they are gone; the area has a reader already. Of ``hold`` and
    ``copy``: ``ESTALE``, the store has dropped this client; ``ENOBUFS``, 1,024 values, or a quarter of the arena, are
    held already.
    """

    def __init__(self, data_path: str, index_path: str, client_path: str) -> None: ...
    def hold(self, key: bytes, name: bytes = b"") -> tuple[int, int, int] | None:
        """``(address, length, pin)``: the bytes stay as they are until the pin is let go of. None: not in memory, not
        verified as yet, or the value's name is another."""
    def let_go(self, pin: int) -> None:
        """``ValueError``: it holds nothing."""
    def lengths(self, keys: bytes, names: list[bytes]) -> list[int]:
        """Bytes of each value that ``hold`` would find now; -1: it would find none, or too much is held."""
    def where(self, keys: bytes) -> bytes:
        """A byte a key: 0 absent, 1 in memory, 2 on disk alone."""
    def prefix(self, keys: bytes) -> int:
        """How many of the keys, from the first on, are in memory or on disk."""
    def copy(self, keys: bytes, names: list[bytes], targets: list[Any], threads: int = 1) -> list[int]:
        """The length of each value, -1 absent; copied without the GIL. One that is longer than its writable buffer is
        not copied."""
    def copy_all(self, keys: bytes, names: list[bytes], targets: list[Any], threads: int = 1) -> list[int] | None:
        """As ``copy``, if every value is in memory and has room, and all may be held at once; else None. Then
        nothing was written, unless the store dropped this client at that moment."""
    def watch(self, watcher: Callable[[str], None] | None) -> None:
        """For tests, which let the store do things then: called in each ``hold`` when the entry was ``seen`` and when
        its pin is written (``pinned``), and in each ``copy`` when values were ``copied``. None: never again."""
    @property
    def closed(self) -> bool:
        """The store has dropped this client: what was held may be another value's by now."""
    @property
    def held(self) -> int:
        """Pins that were not let go of."""
    @property
    def values_max(self) -> int:
        """How many may be held at once."""
    @property
    def bytes_max(self) -> int:
        """How many bytes they may have together; one value alone may have more."""

class Frequency:
    """How often keys of 16 bytes were asked for of late (TinyLFU)."""

    def __init__(self, keys: int) -> None:
        """``keys``: about how many are told apart; three bytes each."""
    def note(self, key: bytes) -> int:
        """One request more; how many came before it, at most 16, never too few of late ones."""
    @property
    def nbytes(self) -> int: ...

class DiskQueue:
    """Reads and writes of one file or device, many at once, past the page cache where the file system can.

    By io_uring, or by a few threads where that is forbidden. One thread uses it. ``OSError``: it cannot be opened, or
    has no room for ``nbytes``. ``ValueError``: past the page cache places, addresses and sizes are whole pages.
    """

    def __init__(
        self,
        path: str,
        nbytes: int = 0,
        depth: int = 32,
        direct: bool = True,
        engine: str = "",
        memory: Sequence[tuple[int, int]] = (),
    ) -> None:
        """``nbytes``: the file's size, all of it taken now; 0: as it is. ``engine``: ``io_uring``, ``threads``, or
        empty for the better one that works. ``memory``: address and size of arenas that operations use."""
    def read(self, tag: int, offset: int, address: int, count: int) -> None:
        """The memory stays alive until ``tag`` comes back."""
    def write(self, tag: int, offset: int, address: int, count: int) -> None: ...
    def write_bytes(self, tag: int, offset: int, data: bytes) -> None:
        """Whole pages, copied now."""
    def sync(self, tag: int) -> None:
        """What has come back before is on the disk when this comes back."""
    def take(self) -> list[tuple[int, int]]:
        """``(tag, errno)`` of what has ended; 0: all bytes were read or written."""
    def fileno(self) -> int:
        """Readable when something has ended."""
    @property
    def file(self) -> int:
        """The file's descriptor."""
    @property
    def direct(self) -> bool: ...
    @property
    def engine(self) -> str: ...
    @property
    def waiting(self) -> int: ...
    @property
    def under_way(self) -> int: ...
