"""Memory of the machine and of the interpreter: too much is refused at once, what stays is not looked through again."""

from __future__ import annotations

import gc

import pytest

from memserve.errors import UserError
from memserve.runtime import memory
from memserve.units import GIB


def test_more_kv_memory_than_the_machine_has_is_a_user_error() -> None:
    memory.check_host_memory(1)
    with pytest.raises(UserError) as caught:
        memory.check_host_memory(1_000_000 * GIB)
    assert "--kv-memory" in (caught.value.hint or "")


def test_the_control_group_counts(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    free = memory.available_memory_bytes()
    assert free is not None and free > 1 << 20, "no files: the kernel's own figure"
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert memory.available_memory_bytes() == 3000
    with pytest.raises(UserError):
        memory.check_host_memory(GIB)


def test_what_stays_is_not_looked_through_again() -> None:
    """The collector rests while a process starts, and leaves alone what was made then; later garbage is collected."""
    frozen = gc.get_freeze_count()
    try:
        with memory.objects_that_stay():
            assert not gc.isenabled()
            kept = [[] for _ in range(1000)]
        assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(kept)
        with pytest.raises(ZeroDivisionError), memory.objects_that_stay():
            raise ZeroDivisionError
        assert gc.isenabled()
    finally:
        gc.unfreeze()
