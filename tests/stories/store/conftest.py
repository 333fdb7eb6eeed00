"""The world of most stories; those that begin or end otherwise have their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from store_world import StoreWorld, finished_world


@pytest.fixture
def world() -> Iterator[StoreWorld]:
    with finished_world() as world:
        yield world
