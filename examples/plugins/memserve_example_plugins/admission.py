"""``--admission tenant-share:requests=8,tokens=60000``: what one tenant may have admitted at once.

Its further requests wait, and hold up no other tenant's. A prompt that is longer than all of its tokens is rejected.
Either limit may be left out.
"""

from collections.abc import Mapping

from memserve.base.types import Request
from memserve.router.admission.needs import ADMIT, AdmissionLoad, AdmissionRule, Verdict


def tenant_share(settings: Mapping[str, str]) -> AdmissionRule:
    if unknown := settings.keys() - {"requests", "tokens"}:
        raise ValueError(f"tenant-share has requests and tokens, and no {', '.join(sorted(unknown))}")
    limits = {name: int(value) for name, value in settings.items()}
    if not limits or min(limits.values()) < 1:
        raise ValueError("tenant-share needs requests=N, or tokens=N, of at least 1")
    requests_max, tokens_max = limits.get("requests"), limits.get("tokens")

    def judge(request: Request, load: AdmissionLoad, now_ns: int, /) -> Verdict:
        own = load.admitted_of(request.tenant)
        if tokens_max is not None and len(request.prompt) > tokens_max:
            return Verdict("reject", f"a prompt of {len(request.prompt)} tokens is beyond your share of {tokens_max}")
        if requests_max is not None and own.requests >= requests_max:
            return Verdict("wait", f"you have {own.requests} requests running, which is your share")
        if tokens_max is not None and own.requests and own.tokens + len(request.prompt) > tokens_max:
            return Verdict("wait", f"your requests have {own.tokens} of your share of {tokens_max} tokens")
        return ADMIT

    return judge
