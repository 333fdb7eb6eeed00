"""What two processes of a test do; a module of its own, for they import it afresh and shall not wait for more."""

from __future__ import annotations

from multiprocessing.connection import Connection

from memserve_lab.experiments.pool_moves import serve


def own_squares(taker: Connection, power: int) -> None:
    """Answers numbers with their powers."""
    while True:
        taker.send(taker.recv() ** power)


def take_squares(told: Connection, owner: Connection, power: int) -> None:
    """Asks the owner; starts only for small powers, and cannot do zero."""
    if power > 2:
        raise ValueError("too much")

    def answer(number: int) -> int:
        owner.send(number)
        return 1 // number and int(owner.recv())

    serve(told, answer)
