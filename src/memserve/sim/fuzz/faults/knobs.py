"""Knobs of a node: a fault turns one, and its end turns it back. Faults overlap, so both ends are steps, not values."""

from __future__ import annotations

from memserve.sim.fuzz.faults.process import Undo


def raise_by(node: object, knob: str, step: int = 1) -> Undo:
    """Add ``step`` to the attribute ``knob``; what is returned takes it away again."""
    setattr(node, knob, getattr(node, knob) + step)

    def lower() -> None:
        setattr(node, knob, getattr(node, knob) - step)

    return lower


def multiply(node: object, knob: str, factor: int) -> Undo:
    """Multiply the attribute ``knob``, a whole number, by ``factor``; what is returned divides it again."""
    setattr(node, knob, getattr(node, knob) * factor)

    def divide() -> None:
        setattr(node, knob, getattr(node, knob) // factor)

    return divide
