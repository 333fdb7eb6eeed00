"""What the connector thinks in vLLM's scheduler: what to promise a request, what to load, and what to save.

A request goes through this, and a request of which nothing is found through the first line alone::

    unknown --found--> LOOKING --held and compared--> PROMISED --blocks allocated--> LOADING --finished--> (over)
       |                  |                               |
       |                  +--late, nothing, or ended------+--> NOTHING (it computes)
       +--other requests hold as much of the store's memory as this engine may--> QUEUED --room, late--> LOOKING
       +--another engine has computed its prompt, and the store has not all of it yet--> AWAITING --all, late--> LOOKING

No IO and no clock of its own: look-ups are asked of what it is given, and times are handed in. Of vLLM's objects only
the few attributes are used that all versions have.

What vLLM's scheduler tells its workers of a step's KV.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class KvLoad:
    """Blocks that a request waits for."""

    request_id: str
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    """Where each goes; vLLM keeps them for the request until the load is reported as finished."""
    groups: tuple[int, ...] = ()
    """The group of KV of each; empty: all are of the first."""


@dataclass(frozen=True, slots=True)
class Save:
    """Blocks of a request that are full once the step has run."""

    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    groups: tuple[int, ...] = ()
    """As in :class:`KvLoad`."""


@dataclass(frozen=True, slots=True)
class Orders:
    """Of one step."""

    loads: tuple[KvLoad, ...] = ()
    saves: tuple[Save, ...] = ()
    begun: tuple[str, ...] = ()
    """Requests that run in this step for the first time since their blocks were loaded: the blocks are theirs."""


_OFFERED_MAX = 65_536
"""Blocks that were saved lately and need not be saved again while the store takes them."""
_OFFERED_NS = 5_000_000_000
_QUEUED_NS = 5_000_000_000
"""How long requests wait for others that hold blocks, if none lets go of any; then they take what they can get."""
_NULL_BLOCK = 0
"""vLLM's block without content."""


class Lookup(Protocol):
    """Where blocks are looked up: :class:`memserve.integrations.vllm.lookups.Lookups`."""

    @property
    def is_known(self) -> bool:
        """Whether there is anything to ask yet."""

    def prefix_at_once(self, hashes: Sequence[bytes]) -> int | None:
        """Blocks that seem to be there, from the first on; None: not known without waiting."""

    def missing_at_once(self, hashes: Sequence[bytes]) -> list[list[bool]]:
        """For each group of KV: whether each block is to be saved, as far as is known without waiting."""

    def has_room(self, blocks: int) -> bool:
        """Whether so many can be held beside those of other requests."""

    def start_lookup(self, request_id: str, hashes: Sequence[bytes]) -> bool:
        """Hold and compare them."""

    def lookup_result(self, request_id: str) -> int | None:
        """How many are held."""

    def forget_request(self, request_id: str) -> None:
        """Hold them no longer."""


class _Phase(Enum):
    QUEUED = auto()
    AWAITING = auto()
    LOOKING = auto()
    PROMISED = auto()
    LOADING = auto()
    NOTHING = auto()


@dataclass(slots=True, eq=False)
class _Promise:
    first: int
    """The block that the look-up began with."""
    deadline_ns: int
    phase: _Phase = _Phase.LOOKING
    end: int = 0
    """Behind the last block that is held."""
    begin: int = 0
    """The first block that vLLM was promised: it has those before."""
    block_ids: frozenset[int] = frozenset()
    """Of vLLM's, that are loaded into, where there is one group of KV."""
    has_failed: bool = False
    awaited_end: int = 0
    """Behind the last block that another engine has computed, where the store could not be looked at at once: less is
    looked up again."""


@dataclass(frozen=True, slots=True)
class EngineBlocks:
    """An engine's blocks, and what it does with those of others."""

    block_tokens: int
    hashes_per_block: int
    """vLLM may hash pieces of blocks."""
    loads: bool = True
    saves: bool = True


class SchedulerSide:
    """One object per engine, used by one thread."""

    def __init__(
        self,
        lookups: Lookup,
        blocks: EngineBlocks,
        wait_ns: int,
        *,
        hashes: Callable[[Any, int], list[bytes]] | None = None,
    ) -> None:
        """``hashes``: names the first blocks of a request, as many of the wanted ones as are known; None: vLLM's block
        hashes do. ``wait_ns``: how long a request may wait for a look-up before it computes."""
        self._is_loading = blocks.loads
        self._is_saving = blocks.saves
        self._lookups = lookups
        self._hashes = hashes or self._own_hashes
        self._block_tokens = blocks.block_tokens
        self._hashes_per_block = blocks.hashes_per_block
        self._wait_ns = wait_ns
        self._requests: dict[str, Any] = {}  # those with blocks
        self._saved: dict[str, int] = {}  # blocks that were looked at, whether they had to be saved or not
        self._promises: dict[str, _Promise] = {}
        self._tables: dict[str, list[list[int]]] = {}
        self._loads: list[KvLoad] = []
        self._loaded: set[str] = set()  # requests that have not run since their blocks were loaded
        self._queued_until_ns = 0  # 0: nothing waits, or what was held was let go of since
        self._offered: OrderedDict[tuple[int, bytes], int] = OrderedDict()

    # -- before a request has blocks

    def match_request(self, request: Any, computed_tokens: int, now_ns: int) -> tuple[int | None, bool]:
        """Tokens beyond ``computed_tokens`` that can be loaded, and that they are loaded while others run; None: ask
        again. Called many times."""
        may = self._is_loading and self._lookups.is_known
        if not may or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        request_id, begin = request.request_id, computed_tokens // self._block_tokens
        promise = self._promises.get(request_id)
        if promise is None or (begin < promise.first and promise.phase is not _Phase.LOADING):
            promise = self._start_lookup(request, begin, now_ns, now_ns + self._wait_ns)
        elif promise.phase in (_Phase.AWAITING, _Phase.QUEUED):
            promise = self._start_lookup(request, begin, now_ns, promise.deadline_ns)
        if promise is None:
            return 0, False
        if promise.phase in (_Phase.AWAITING, _Phase.QUEUED):
            return None, False
        if promise.phase is _Phase.LOOKING:
            count = self._lookups.lookup_result(request_id)
            if count is None and now_ns < promise.deadline_ns:
                return None, False
            if count is not None and promise.first + count < promise.awaited_end and now_ns < promise.deadline_ns:
                promise.phase = _Phase.AWAITING
                return None, False
            promise.phase, promise.end = _Phase.PROMISED, promise.first + (count or 0)
        if promise.phase is not _Phase.PROMISED or promise.end <= begin:
            self._give_up(request_id, promise)
            return 0, False
        promise.begin = begin
        return (promise.end - begin) * self._block_tokens, True

    def _start_lookup(self, request: Any, begin: int, now_ns: int, until_ns: int) -> _Promise | None:
        """A look-up that was begun, or is put off: since the store still gets what another engine has computed
        (``until_ns`` at the latest), or since other requests hold too much. None: nothing is there."""
        request_id = request.request_id
        hashes = self._hashes(request, (request.num_tokens - 1) // self._block_tokens)[begin:]
        awaited_end = min(_computed_elsewhere(request) // self._block_tokens, begin + len(hashes)) if hashes else 0
        prefix_blocks = self._lookups.prefix_at_once(hashes) if hashes else 0
        self._lookups.forget_request(request_id)
        if prefix_blocks is not None and begin + prefix_blocks < awaited_end and now_ns < until_ns:
            promise = _Promise(begin, until_ns, _Phase.AWAITING)
        elif prefix_blocks and not self._lookups.has_room(prefix_blocks) and now_ns < self._queued_until(now_ns):
            promise = _Promise(begin, until_ns, _Phase.QUEUED)
        elif prefix_blocks != 0 and self._lookups.start_lookup(request_id, hashes[:prefix_blocks]):
            is_late = now_ns >= until_ns
            again = 0 if is_late or prefix_blocks is not None else awaited_end
            promise = _Promise(begin, now_ns + self._wait_ns if is_late else until_ns, awaited_end=again)
        elif awaited_end:
            promise = _Promise(0, 0, _Phase.NOTHING)  # it shall not wait again and again
        else:
            self._promises.pop(request_id, None)
            return None
        self._promises[request_id] = promise
        return promise

    def _queued_until(self, now_ns: int) -> int:
        """When requests have waited for long enough for those that hold blocks."""
        self._queued_until_ns = self._queued_until_ns or now_ns + _QUEUED_NS
        return self._queued_until_ns

    def _release_lookup(self, request_id: str) -> None:
        self._queued_until_ns = 0
        self._lookups.forget_request(request_id)

    def _give_up(self, request_id: str, promise: _Promise) -> None:
        if promise.phase is not _Phase.LOADING:
            promise.phase = _Phase.NOTHING
            self._release_lookup(request_id)

    # -- blocks

    def on_blocks_allocated(self, request: Any, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The request has blocks: ``tables`` of all groups of KV. ``external_tokens``: it waits for that many to be
        loaded; 0: for none, whatever it was promised, or the load is over."""
        request_id = request.request_id
        self._requests[request_id] = request
        promise = self._promises.get(request_id)
        if promise is None or promise.phase is _Phase.LOADING:
            return
        if external_tokens == 0:
            self._give_up(request_id, promise)
            return
        begin, end = promise.begin, promise.begin + external_tokens // self._block_tokens
        hashes = self._hashes(request, end)[begin:]
        entries = [
            (group, block_hash, block_id)
            for group, table in enumerate(tables)
            for block_hash, block_id in zip(hashes, table[begin:end], strict=True)
            if block_id != _NULL_BLOCK  # beyond a window: the group has no block there
        ]
        groups, names, block_ids = (tuple(column) for column in zip(*entries, strict=True))
        promise.phase, promise.block_ids = _Phase.LOADING, frozenset(block_ids)
        self._loads.append(KvLoad(request_id, names, block_ids, groups if len(tables) > 1 else ()))

    def plan_step(self, output: Any, now_ns: int) -> Orders:
        """What the workers shall do in the step that ``output`` describes. Called once for each."""
        table_of = self._table_of(output)
        saves = [
            save
            for request_id, tokens in output.num_scheduled_tokens.items()
            if (save := self._save_blocks(request_id, tokens, table_of, now_ns)) is not None
        ]
        loads, self._loads = tuple(self._loads), []
        started_ids = tuple(request_id for request_id in output.num_scheduled_tokens if request_id in self._loaded)
        self._loaded.difference_update(started_ids)
        return Orders(loads, tuple(saves), started_ids)

    def _save_blocks(self, request_id: str, tokens: int, table_of: Any, now_ns: int) -> Save | None:
        """Blocks that are full after a step with ``tokens`` more, and that the store seems not to have.

        Tokens that are only guessed (drafts, or placeholders of tokens that are still being computed) are not counted:
        ``num_tokens`` are the known ones.
        """
        request = self._requests.get(request_id)
        if request is None or not (self._is_saving and self._lookups.is_known):
            return None
        full_blocks = min(request.num_computed_tokens + tokens, request.num_tokens) // self._block_tokens
        begin = self._saved.get(request_id, 0)
        if full_blocks <= begin:
            return None
        hashes = self._hashes(request, full_blocks)[begin:]
        tables = table_of(request_id)
        if tables is None or not hashes:
            return None
        end = begin + len(hashes)
        self._saved[request_id] = end
        entries = [
            (group, block_hash, block_id)
            for group, (table, flags) in enumerate(zip(tables, self._lookups.missing_at_once(hashes), strict=True))
            for block_hash, block_id, lacks in zip(hashes, table[begin:end], flags, strict=False)
            if lacks and block_id != _NULL_BLOCK and self._offer_block((group, block_hash), now_ns)
        ]
        if not entries:
            return None
        groups, names, block_ids = (tuple(column) for column in zip(*entries, strict=True))
        return Save(names, block_ids, groups if len(tables) > 1 else ())

    def _offer_block(self, block_hash: tuple[int, bytes], now_ns: int) -> bool:
        """False: it was saved a moment ago."""
        before = self._offered.get(block_hash)
        if before is not None and now_ns - before < _OFFERED_NS:
            return False
        self._offered[block_hash] = now_ns
        self._offered.move_to_end(block_hash)
        if len(self._offered) > _OFFERED_MAX:
            self._offered.popitem(last=False)
        return True

    # -- ends

    def on_loads_received(
        self, request_ids: Iterable[str], failed_block_ids: Collection[int], failed_ids: Collection[str] = ()
    ) -> None:
        """Loads are over; ``failed_ids``: of these requests vLLM computes all. A request whose load failed computes,
        also what could be loaded at a second try: it shall not try again and again."""
        if failed_block_ids:
            for promise in self._promises.values():
                if promise.phase is _Phase.LOADING and not promise.block_ids.isdisjoint(failed_block_ids):
                    promise.has_failed = True
        for request_id in request_ids:
            self._release_lookup(request_id)
            over = self._promises.pop(request_id, None)
            has_failed = over is not None and (over.has_failed or request_id in failed_ids)
            if over is not None and not has_failed and request_id in self._requests:
                self._loaded.add(request_id)
            if has_failed and request_id in self._requests:
                self._promises[request_id] = _Promise(0, 0, _Phase.NOTHING)

    def stored_tokens(self, request: Any) -> int:
        """Tokens, from the first on, whose blocks were given to the store, or were there."""
        return min(self._saved.get(request.request_id, 0) * self._block_tokens, int(request.num_tokens))

    def on_request_finished(self, request_id: str) -> None:
        """The request is over. A load under way goes on: vLLM keeps its blocks until it is reported."""
        for table in (self._requests, self._saved, self._tables):
            table.pop(request_id, None)
        self._loaded.discard(request_id)
        promise = self._promises.get(request_id)
        if promise is not None and promise.phase is not _Phase.LOADING:
            del self._promises[request_id]
            self._release_lookup(request_id)

    def forget_offers(self) -> None:
        """Save everything again: the store was emptied."""
        self._offered.clear()
        self._saved.clear()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is remembered of any request."""
        return not (self._requests or self._saved or self._promises or self._tables or self._loads or self._loaded)

    # -- vLLM's tables

    def _own_hashes(self, request: Any, blocks: int) -> list[bytes]:
        """Of the first ``blocks`` blocks, as many as are known: the hash at a block's end has all of it in it."""
        every = self._hashes_per_block
        return [bytes(block_hash) for block_hash in request.block_hashes[every - 1 : blocks * every : every]]

    def _table_of(self, output: Any) -> Any:
        """A function from request to its block table; None: there is none. From vLLM itself where it says it (0.30 on),
        else kept here from what each step adds, and from the tables that vLLM 0.29 says again when they change."""
        state = getattr(output, "kv_connector_block_state", None)
        if state is not None and hasattr(state, "get_block_ids"):
            return state.get_block_ids
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(table) for table in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = [list(table) for table in added or ()]
            elif added is not None:
                tables = self._tables.setdefault(request_id, [[] for _ in added])
                for table, more in zip(tables, added, strict=True):
                    table.extend(more)
        for request_id, block_ids in getattr(state, "block_ids", {}).items():
            self._tables[request_id] = [list(table) for table in block_ids]
        return self._tables.get


def _computed_elsewhere(request: Any) -> int:
    """Tokens of the prompt that another engine has computed for this request, as its answer said; 0: none has."""
    params = getattr(request, "kv_transfer_params", None) or {}
    tokens = params.get("remote_num_tokens") if params.get("do_remote_prefill") else 0
    return tokens if isinstance(tokens, int) else 0
