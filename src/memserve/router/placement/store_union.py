"""What several stores have together: a prefix whose blocks lie here and there among them is one prefix.

The directory knows each store on its own; a prefix that is spread over four ends in each of them at the first block
that another has. So the stores are in a second directory as well, all as one holder, with a reference on a block for
each store that has it, on that store's tier. Without a second store there is none, and matches are what they were.

Where a sequence needs more than KV to go on, a state or a window, that lies here and there as well, block by block: a
prefix counts as far as all of it is somewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.base.errors import check
from memserve.base.layer_kv import WindowPages
from memserve.base.states import BehindKv
from memserve.kv.identity import names_behind, pack_behind, state_identities
from memserve.kv.store_shares import KEY_BYTES, NO_SPARE, StoreShares, split_keys
from memserve.protocol.peers import Peer
from memserve.router.members.loads import Ints

ALL_STORES = 0
"""The one holder of the second directory."""
_FAR, _ON_DISK = 1, 2
"""How much a copy on another host, and one on a disk, is to be avoided."""
_LOOKS = 64
"""Blocks behind which a state is looked for at once."""


class StoreUnion:
    """Follows what the directory knows of the stores."""

    def __init__(self, directory: _core.PrefixDirectory, key: bytes) -> None:
        """``key``: of the cluster's identities, 16 bytes."""
        self._directory = directory
        self._key = key
        self._union: _core.PrefixDirectory | None = None
        self._numbers: dict[int, None] = {}
        self._turn = 1

    @property
    def is_joint(self) -> bool:
        """Whether there are several stores."""
        return self._union is not None

    def add_store(self, number: int) -> None:
        """A store without blocks."""
        self._numbers[number] = None
        if len(self._numbers) == 2:
            self._union = _core.PrefixDirectory()
            for store in self._numbers:
                self._add_holdings(store)

    def remove_store(self, number: int) -> None:
        """A store goes, or is about to be told of anew; the directory still knows what it had."""
        if self._union is not None:
            self._drop_holdings(number)
        del self._numbers[number]
        if len(self._numbers) < 2:
            self._union = None

    def apply_change(self, number: int, identities: bytes, change: Callable[[], object]) -> None:
        """``change`` tells the directory of these blocks of a member; the union follows where that is a store."""
        if self._union is None or number not in self._numbers:
            change()
            return
        before = self._places_of(number, identities)
        change()
        after = self._places_of(number, identities)
        keys = np.frombuffer(identities, f"V{KEY_BYTES}")
        for tier in (0, 1):
            was_here, is_here = before == tier + 1, after == tier + 1
            self._union.store(ALL_STORES, tier, keys[is_here & ~was_here].tobytes())
            self._union.evict(ALL_STORES, keys[was_here & ~is_here].tobytes(), tier)

    def replace_holdings(self, number: int, change: Callable[[], object]) -> None:
        """``change`` tells the directory anew of all that a member has."""
        is_followed = self._union is not None and number in self._numbers
        if is_followed:
            self._drop_holdings(number)
        change()
        if is_followed:
            self._add_holdings(number)

    def _places_of(self, number: int, identities: bytes) -> NDArray[np.uint8]:
        return np.frombuffer(self._directory.locate(identities, [number]), np.uint8)

    def _add_holdings(self, number: int) -> None:
        if self._union is not None:
            for tier, identities in enumerate(_holdings(self._directory, number)):
                self._union.store(ALL_STORES, tier, identities)

    def _drop_holdings(self, number: int) -> None:
        if self._union is not None:
            for tier, identities in enumerate(_holdings(self._directory, number)):
                self._union.evict(ALL_STORES, identities, tier)

    # -- prompts

    def join_columns(self, columns: Ints, identities: bytes, behind: BehindKv) -> None:
        """In ``columns`` (``Matches.columns``) the first store stands for all: it has what they have together, as far
        as they have what comes ``behind`` it."""
        if self._union is None:
            return
        rows = list(self._numbers)
        columns[:, rows] = 0
        union_columns, _ = self._union.match_columns(identities, 1)
        if behind.most_blocks and (blocks := int(union_columns[0, ALL_STORES])):
            end = self._resumable_blocks(self._union, split_keys(identities[: blocks * KEY_BYTES]), behind)
            union_columns, _ = self._union.match_columns(identities[: end * KEY_BYTES], 1)
        columns[:, min(rows)] = union_columns[:, ALL_STORES]

    def _resumable_blocks(self, union: _core.PrefixDirectory, identities: list[bytes], behind: BehindKv) -> int:
        """How many of these blocks, all of whose KV some store has, a sequence can go on from."""
        if behind.windows is not None:
            return self._windowed_blocks(union, identities, behind.windows)
        for first in range((len(identities) - 1) // _LOOKS * _LOOKS, -1, -_LOOKS):
            some = identities[first : first + _LOOKS]
            # the first name first: behind most blocks no state was ever stored
            heads = [state_identities(identity, 1, self._key)[0] for identity in some]
            for index in np.flatnonzero(self._is_stored(union, heads))[::-1].tolist():
                if self._is_stored(union, state_identities(some[index], behind.most_blocks, self._key)).all():
                    return first + int(index) + 1
        return 0

    def _windowed_blocks(self, union: _core.PrefixDirectory, identities: list[bytes], windows: WindowPages) -> int:
        """As :meth:`_resumable_blocks`: the parts of the last window are all there."""
        count, part_blocks = len(identities), windows.part_blocks
        firsts = windows.first_entries(np.arange(1, count + 1) * windows.block_tokens)
        for first in (min(int(firsts[-1]), count - 1), 0):  # mostly all of it was stored: its last window is enough
            names = names_behind(identities[first:], (count - first) * part_blocks, part_blocks, self._key)
            is_whole = self._is_stored(union, names).reshape(-1, part_blocks).all(axis=1)
            entries = np.arange(first, count)
            last_gaps = np.maximum.accumulate(np.where(is_whole, first - 1, entries))
            resumable = entries[firsts[first:] > last_gaps]
            if len(resumable):
                return int(resumable[-1]) + 1
        return 0

    @staticmethod
    def _is_stored(union: _core.PrefixDirectory, names: Sequence[bytes]) -> NDArray[np.bool_]:
        located: NDArray[np.bool_] = np.frombuffer(union.locate(b"".join(names), [ALL_STORES]), np.uint8) != 0
        return located

    def names_behind(self, identities: bytes, behind: BehindKv, block_tokens: int) -> bytes:
        """Of what comes ``behind`` the KV of a prefix whose blocks have these ``identities``."""
        return pack_behind(identities, behind, block_tokens, self._key)

    def choose_sources(
        self, identities: bytes, stores: Mapping[int, tuple[Peer, bool]]
    ) -> tuple[tuple[Peer, ...], bytes, bytes]:
        """Where to fetch each of these blocks: stores; a byte a block, which of them; and which of them has a second
        copy. ``stores``: by number, and whether it is on the host of the instance that fetches.

        A copy in memory goes before one on a disk, then one on the own host before others. Equal copies take turns from
        prompt to prompt: what is in use stays in memory in each of its stores. Up to the first block that none of
        ``stores`` has."""
        numbers = [number for number in self._numbers if number in stores]
        peers = tuple(stores[number][0] for number in numbers)
        if not numbers:
            return (), b"", b""
        located = self._directory.locate(identities, numbers)
        places = np.frombuffer(located, np.uint8).reshape(-1, len(numbers))
        shares = StoreShares(peer.name for peer in peers)
        order = shares.rank_stores(identities)
        by_name = np.array([shares.names.index(peer.name) for peer in peers])
        turns = np.argsort(order, axis=1)[:, by_name]  # the place of each store in a block's line, by its column
        turns = turns if self._turn > 0 else len(numbers) - 1 - turns
        self._turn = -self._turn
        far = np.array([0 if stores[number][1] else _FAR for number in numbers])
        costs = (np.where(places == 2, _ON_DISK, 0) + far) * len(numbers) + turns
        costs[places == 0] = nowhere = np.iinfo(costs.dtype).max
        missing = np.flatnonzero((places == 0).all(axis=1))
        end = int(missing[0]) if len(missing) else len(places)
        first = costs[:end].argmin(axis=1)
        costs[np.arange(end), first] = nowhere
        spare = np.where((costs[:end] < nowhere).any(axis=1), costs[:end].argmin(axis=1), NO_SPARE)
        has_spares = bool((spare != NO_SPARE).any())
        return peers, first.astype(np.uint8).tobytes(), spare.astype(np.uint8).tobytes() if has_spares else b""

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` when the union is not what the stores have."""
        check((self._union is not None) == (len(self._numbers) > 1), "a union of {} stores", len(self._numbers))
        if self._union is None:
            return
        self._union.check_invariants()
        counts: dict[bytes, list[int]] = {}
        for number in self._numbers:
            for tier, identities in enumerate(_holdings(self._directory, number)):
                for offset in range(0, len(identities), KEY_BYTES):
                    counts.setdefault(identities[offset : offset + KEY_BYTES], [0, 0])[tier] += 1
        union_counts = {identity: [upper, lower] for identity, upper, lower in self._union.dump(ALL_STORES)}
        check(union_counts == counts, "the union has {} blocks, the stores {}", len(union_counts), len(counts))


def _holdings(directory: _core.PrefixDirectory, number: int) -> tuple[bytes, bytes]:
    """All that a member has, in its upper tier and in its lower one alone."""
    entries = directory.dump(number)
    upper = b"".join(identity for identity, above, _ in entries if above)
    return upper, b"".join(identity for identity, above, below in entries if below and not above)
