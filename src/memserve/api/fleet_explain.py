"""Why a request of a fleet went where it went: a header of the answer, so that its bytes stay the engine's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from memserve.api.endpoints import EXPLAIN_HEADER
from memserve.fleet.words import Forward, Prefill, PromptSpace

REASON_CHARS_MAX = 200
FORWARDED_KEY = "memserve.forwarded"
"""Of an ASGI scope: the last decision for its request, and why engines before gave no answer."""


def explanation(chosen: Forward, failed: Mapping[str, str]) -> tuple[bytes, bytes]:
    """The header, with a JSON object in ASCII. ``failed``: why each engine that was tried before gave no answer."""
    told = {
        "engine": chosen.engine,
        "reason": chosen.reason,
        "compared_by": chosen.space,
        "prompt_tokens": chosen.prompt_tokens,
        "matched_tokens": chosen.matched_tokens,
        "failed": {name: reason[:REASON_CHARS_MAX] for name, reason in failed.items()},
    }
    return EXPLAIN_HEADER, json.dumps(told).encode()


def told(decision: Forward | Prefill, failed: Mapping[str, str]) -> dict[str, Any]:
    """A decision, for a timeline. Counts of tokens only where the prompt was compared by its tokens."""
    entry: dict[str, Any] = {"instances": [decision.engine]}
    if not isinstance(decision, Forward):
        return entry
    if decision.space is PromptSpace.TOKENS:
        entry |= {"prompt_tokens": decision.prompt_tokens, "cached_tokens": decision.matched_tokens}
    facts = {"reason": decision.reason, "compared_by": decision.space.value}
    facts |= {f"failed_at {name}": reason[:REASON_CHARS_MAX] for name, reason in failed.items()}
    return entry | {"story": [{"fact": fact, "value": value} for fact, value in facts.items()]}
