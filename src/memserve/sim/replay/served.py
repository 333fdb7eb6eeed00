"""What became of each request: the simulator's side of the bench's records."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class Served:
    """One request. Times are nanoseconds since the workload began; latency counts from ``scheduled_ns``."""

    session: str
    turn: int
    group: str
    scheduled_ns: int
    prompt_tokens: int
    first_ns: int | None = None
    token_ns: array[int] = field(default_factory=lambda: array("q"))
    """When each token was with the client."""
    end_ns: int | None = None
    cached_tokens: int = 0
    instance: str = ""
    """Who computed it, as the story says: ``p1 to d1``."""
    finish: str = ""
    """Why it ended; empty: it has not, or it was refused."""
    error: str = ""
    retry_after_s: float | None = None

    @property
    def answered(self) -> bool:
        """To its full length, or by the context's end."""
        return self.finish == "length"
