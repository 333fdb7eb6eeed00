"""Which instances suit a machine, and how many clients suit them (level 1): pure functions over numbers."""

from __future__ import annotations

from dataclasses import dataclass

from memserve.units import GIB, human_bytes

APART_CORES_MIN = 8
"""Prefill and decode go apart from so many cores on. With fewer, two processes that both want every core cost more
than prompts in the middle of answers do: on two cores time to first token and completion time are several times those
of one colocated instance (``bench/first_hour.py --shapes``)."""

PROCESS_BYTES = 3 * GIB // 4
"""What an instance takes beside weights and KV: torch, transformers, workspaces."""

CLIENT_TOKENS = 1000
"""A client's prompt and answer, for the estimate of how many fit."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What instances may use."""

    cores: int
    memory_bytes: int | None
    """``None``: unknown."""
    gpu: bool = False
    """Whether the device is a GPU."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Instances of each role."""

    prefill: int
    decode: int
    colocated: int
    reason: str = ""
    """Why it was chosen; empty: it was asked for."""


def instance_bytes(kv_bytes: int, weight_bytes: int) -> int:
    """Host memory of one instance at most: its weights are there twice while they are packed."""
    return kv_bytes + 2 * weight_bytes + PROCESS_BYTES


def choose_shape(machine: Machine, one_instance_bytes: int | None) -> Shape:
    """One colocated instance, or a prefill and a decode instance where there is room for both.

    ``one_instance_bytes``: host memory that an instance takes; ``None``: unknown before the model is here.
    """
    if machine.gpu:
        return Shape(0, 0, 1, "KV in the memory of a GPU stays in one process")
    if machine.cores < APART_CORES_MIN:
        cores = f"{machine.cores} core{'s' if machine.cores != 1 else ''}"
        return Shape(0, 0, 1, f"{cores} here, and prefill and decode go apart from {APART_CORES_MIN} on")
    if one_instance_bytes is None or machine.memory_bytes is None:
        return Shape(0, 0, 1, "it is not known whether the memory holds two")
    both = 2 * one_instance_bytes
    if both > machine.memory_bytes:
        available = human_bytes(machine.memory_bytes)
        return Shape(0, 0, 1, f"two want {human_bytes(both)}, and {available} are available")
    return Shape(1, 1, 0, f"{machine.cores} cores, and memory for both")


def clients_that_fit(kv_tokens: int, context_tokens: int, running_max: int) -> int:
    """About how many clients can be served at once, with :data:`CLIENT_TOKENS` each or the context if it is less."""
    return max(1, min(kv_tokens // min(CLIENT_TOKENS, context_tokens), running_max))
