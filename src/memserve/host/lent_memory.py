"""Memory of a process that the instances of a cluster use: what leaves theirs goes there, and they fetch it back.

A store without disks, in a thread of the process that lends. The router sees it as it sees any store, and what is in
it ends with the process.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

from memserve.base.errors import UserError
from memserve.store.disks.events import DisksConfig
from memserve.store.host.process import StoreLives, StorePlace
from memserve.system.secrets import Secret
from memserve.transport.network_devices import join_addresses

_POLL_S = 0.05


class LentMemory:
    """What :meth:`memserve.PoolPeer.lend_memory` returns. Every call may be used from any thread."""

    def __init__(self, nbytes: int, join: str, *, name: str, secret: Secret, host: str, link: str) -> None:
        """``join``: ``HOST:PORT`` of the router, or of several, with commas between them. ``name``: what it is called
        in the cluster; no other member has it. Raises :class:`UserError` for anything else."""
        place = StorePlace(
            name=name,
            join=join_addresses(join, "join"),
            secret=secret,
            host=host,
            link=link,
            dram_bytes=nbytes,
            folders=(),
            disks=DisksConfig(),
            is_memory_kept=False,
        )
        self._failure: UserError | None = None
        self._lives = StoreLives(place, lambda run: None)
        self._thread = threading.Thread(target=self._run_store, name="memserve-lent-memory", daemon=True)
        self._thread.start()

    @property
    def is_member(self) -> bool:
        """Whether the cluster's router has accepted it."""
        return self._lives.router is not None

    def wait_member(self, timeout_s: float) -> None:
        """Until it is a member. Raises :class:`UserError` where the router refuses it, or is not there in time."""
        deadline_s = time.monotonic() + timeout_s
        while not self.is_member:
            if not self._thread.is_alive():
                raise self._failure or UserError("the memory is lent no more")
            if time.monotonic() > deadline_s:
                hint = "does it run, and has it this secret?"
                raise UserError(f"the router has not answered within {timeout_s:g} s", hint=hint, param="join")
            time.sleep(_POLL_S)

    def read_numbers(self) -> dict[str, int]:
        """Sizes and totals, as ``memserve store stat`` shows them. Raises :class:`UserError` once it has ended."""
        while (run := self._lives.present) is None and self._thread.is_alive():  # between two lives
            time.sleep(_POLL_S)
        if run is None:
            raise self._failure or UserError("the memory is lent no more")
        return run.read_numbers()

    def close(self, patience_s: float = 0.0) -> None:
        """Take the memory back. Within ``patience_s`` what is in it goes to other stores, as far as there are some.

        Raises :class:`UserError` when the cluster had refused it."""
        self._lives.request_end(patience_s)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> LentMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run_store(self) -> None:
        try:
            self._lives.run_all()
        except UserError as error:
            self._failure = error
