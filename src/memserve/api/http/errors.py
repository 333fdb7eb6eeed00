"""Errors as OpenAI's clients expect them: a status and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from memserve.base.errors import UserError
from memserve.host.engine import Refusal, Rejected
from memserve.instance.events import GRAMMAR_FAILED, NO_TOKEN_LEFT

ECHO_CHARS_MAX = 200
"""How much of a client's input an error may repeat."""

_MESSAGE_CHARS_MAX = 400
_PARAM_CHARS_MAX = 100
_CUT = " ... "


def echo(text: str, most: int = ECHO_CHARS_MAX) -> str:
    """A client's ``text`` as an error may repeat it: the middle of a long one is left out."""
    if len(text) <= most:
        return text
    tail = (most - len(_CUT)) // 3
    return text[: most - len(_CUT) - tail] + _CUT + text[-tail:]


class ApiError(Exception):
    """An error answer. It repeats at most :data:`ECHO_CHARS_MAX` characters of the client's input."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        if param is not None and len(param) > _PARAM_CHARS_MAX:  # a field that the client invented
            message = message.replace(param, echo(param, _PARAM_CHARS_MAX))
            param = echo(param, _PARAM_CHARS_MAX)
        if len(message) > _MESSAGE_CHARS_MAX:  # only a client's input makes a message this long
            message = echo(message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def encode_body(self) -> bytes:
        """The JSON body."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


_MESSAGE_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""Anthropic's kinds of errors, by status."""


def is_message_path(path: str) -> bool:
    """Whether ``path`` is one of Anthropic's interface: its errors have that form."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def message_error(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """``error`` in Anthropic's form."""
    too_long = "prompt is too long: " if error.code == "context_length_exceeded" else ""  # what agents look for
    kind = _MESSAGE_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": too_long + error.message}, "request_id": request_id}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong; sending it again will not help."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, feature: str) -> ApiError:
    """400: a feature of the protocol that memserve does not have. It is never silently ignored."""
    return ApiError(
        400, f"{feature} is not supported by this server (in '{param}')", param=param, code="unsupported_parameter"
    )


def from_user_error(error: UserError) -> ApiError:
    """400 for a :class:`UserError` from below, with its hint."""
    return bad_request(str(error), param=error.param)


def unauthorized() -> ApiError:
    """401: no key, or a wrong one."""
    return ApiError(
        401,
        "Incorrect or missing API key: send it as 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def model_not_found(name: str, served: str) -> ApiError:
    """404: the client asks for a model that is not the one served."""
    message = f"The model `{echo(name)}` does not exist; this server serves `{served}`"
    return ApiError(404, message, param="model", code="model_not_found")


def too_large(limit_bytes: int) -> ApiError:
    """413: the body is longer than the server reads."""
    return ApiError(413, f"The request body is larger than {limit_bytes} bytes", code="request_too_large")


def client_too_slow() -> ApiError:
    """408, in the middle of a stream: its client reads more slowly than tokens are generated."""
    message = "The stream ends here: the client read it too slowly, and too much output was waiting"
    return ApiError(408, message, kind="timeout", code="client_too_slow")


def client_bodies_full() -> ApiError:
    """429: this client's bodies fill the memory that one client may use."""
    message = "Your request bodies take too much memory together: wait until some of them are answered"
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers={"retry-after": "1"})


def bodies_full() -> ApiError:
    """503: the bodies of all clients fill the memory for bodies."""
    message = "The server has no memory for another large request body now"
    return ApiError(503, message, kind="server_error", code="overloaded", headers={"retry-after": "1"})


def rejected(rejection: Rejected) -> ApiError:
    """400 when the engine can never run such a request, 429 when it can later, 503 when it is closing or too busy, 422
    and 409 where requests with one key contradict each other."""
    match rejection.refusal:
        case Refusal.IMPOSSIBLE:
            return bad_request(rejection.reason, code="request_rejected")
        case Refusal.CLOSING:
            return shutting_down()
        case Refusal.KEY_REUSED:
            return ApiError(422, rejection.reason, param="Idempotency-Key", code="idempotency_key_reused")
        case Refusal.TAKEN_OVER:
            return ApiError(409, rejection.reason, param="Idempotency-Key", code="answer_taken_over")
    headers = {"retry-after": str(max(1, math.ceil(rejection.retry_after_s or 0)))}
    if rejection.refusal is Refusal.OVERLOADED:
        return ApiError(503, rejection.reason, kind="server_error", code="overloaded", headers=headers)
    return ApiError(429, rejection.reason, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)


def engine_silent() -> ApiError:
    """503: the engine does not answer."""
    headers = {"retry-after": "1"}
    return ApiError(503, "The engine does not answer now", kind="server_error", code="overloaded", headers=headers)


def shutting_down() -> ApiError:
    """503: the server is shutting down."""
    return ApiError(
        503, "The server is shutting down", kind="server_error", code="shutting_down", headers={"retry-after": "5"}
    )


def deadline_passed() -> ApiError:
    """504: the request's own deadline passed before it was done."""
    return ApiError(504, "The request's deadline passed before it was done", kind="timeout", code="deadline_exceeded")


def row_failed(reason: str) -> ApiError:
    """500: computing this request failed, and would fail again; other requests are not affected. 400 when its own
    parameters leave no token to draw, or its grammar cannot be followed."""
    if reason.startswith(GRAMMAR_FAILED):
        return ApiError(400, f"The request cannot be answered: {reason}", code="grammar_too_complex")
    if reason == NO_TOKEN_LEFT:
        return ApiError(400, f"The request cannot be answered: {reason}", code="no_token_left")
    return ApiError(500, f"The request failed: {reason}", kind="server_error", code="request_failed")


def internal() -> ApiError:
    """500: our fault; the log has the details, the client gets none."""
    message = "The server failed while working on the request"
    return ApiError(500, message, kind="server_error", code="internal_error")
