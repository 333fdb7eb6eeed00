"""Two processes: one owns memory, the other measures how it gets at it (level 4).

Both are started afresh, each pair with an environment of its own: a link's library reads its environment once, and no
contender shall carry what another one has mapped.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from memserve.errors import UserError

START_S, ANSWER_S = 60.0, 60.0
STOP_S = 5.0
Side = Callable[..., None]
"""A process's work: ``(pipe to the other one, ...)``; the taker's has the pipe to the parent before it."""


class Pair:
    """``own`` in one process and ``take`` in another, until :meth:`close`. Both must be importable by name."""

    def __init__(self, name: str, own: Side, take: Side, environment: dict[str, str], *arguments: Any) -> None:
        """Raises :class:`UserError` when the taker does not say that it is ready."""
        self.name = name
        context = multiprocessing.get_context("spawn")
        owner_side, taker_side = context.Pipe()
        self._told, telling = context.Pipe()
        self._processes = [
            context.Process(target=_run, args=(environment, own, owner_side, *arguments), daemon=True),
            context.Process(target=_run, args=(environment, take, telling, taker_side, *arguments), daemon=True),
        ]
        for process in self._processes:
            process.start()
        for end in (owner_side, taker_side, telling):
            end.close()
        try:
            self._answer(START_S)
        except UserError:
            self.close()
            raise

    def ask(self, question: Any) -> Any:
        """What the taker answers. Raises :class:`UserError` when it fails or does not."""
        self._told.send(question)
        return self._answer(ANSWER_S)

    def close(self) -> None:
        """End both."""
        self._told.close()
        for process in reversed(self._processes):  # the taker ends by itself, then the owner
            process.join(STOP_S)
            if process.is_alive():
                process.kill()
                process.join()

    def _answer(self, within_s: float) -> Any:
        try:
            found = self._told.recv() if self._told.poll(within_s) else Failed("no answer in time")
        except (EOFError, OSError):
            found = Failed("a process died")
        if isinstance(found, Failed):
            raise UserError(f"{self.name} does not work here: {found.why}")
        return found


class Failed:
    """What a taker says when it cannot."""

    def __init__(self, why: str) -> None:
        self.why = why


def serve(told: Connection, answer: Callable[[Any], Any]) -> None:
    """The taker's loop: ready, then a question an answer, until the parent has gone."""
    told.send("ready")
    while True:
        try:
            question = told.recv()
        except EOFError:
            return
        try:
            told.send(answer(question))
        except Exception as error:  # told to the parent, who decides
            told.send(Failed(f"{type(error).__name__}: {error}"))


def _run(environment: dict[str, str], work: Side, *arguments: Any) -> None:
    os.environ.update(environment)
    try:
        work(*arguments)
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        return  # the other one, or the person, has ended it
    except Exception as error:
        if isinstance(arguments[0], Connection):
            arguments[0].send(Failed(f"{type(error).__name__}: {error}"))
