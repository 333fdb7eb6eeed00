"""Why a request of a fleet went where it went: a header of the answer, so that its bytes stay the engine's."""

from __future__ import annotations

import json
from collections.abc import Mapping

from memserve.api.endpoints import EXPLAIN_HEADER
from memserve.fleet.words import Forward

REASON_CHARS_MAX = 200


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
    return EXPLAIN_HEADER.encode(), json.dumps(told).encode()
