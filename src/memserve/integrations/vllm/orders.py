"""What vLLM's scheduler tells its workers of a step's KV."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
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
    """As in :class:`Load`."""


@dataclass(frozen=True, slots=True)
class Orders:
    """Of one step."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    begun: tuple[str, ...] = ()
    """Requests that run in this step for the first time since their blocks were loaded: the blocks are theirs."""
