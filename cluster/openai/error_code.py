"""Every code that an error's body may have, and the HTTP status that it comes with. docs/errors.md explains them."""

from enum import Enum
from typing import Final

DISCONNECTED: Final = 499
"""The status under which a request is counted whose client left before its end. Nobody is told."""


class ErrorCode(Enum):
    """``text`` is the code, as clients see it. Codes never change their meaning."""

    INVALID_JSON = ("invalid_json", 400)
    INVALID_REQUEST = ("invalid_request", 400)
    UNSUPPORTED_PARAMETER = ("unsupported_parameter", 400)
    NO_CHAT_TEMPLATE = ("no_chat_template", 400)
    CONTEXT_LENGTH_EXCEEDED = ("context_length_exceeded", 400)
    INVALID_API_KEY = ("invalid_api_key", 401)
    NOT_FOUND = ("not_found", 404)
    MODEL_NOT_FOUND = ("model_not_found", 404)
    REQUEST_NOT_FOUND = ("request_not_found", 404)
    OTHER_FRONT_END = ("other_front_end", 404)
    METHOD_NOT_ALLOWED = ("method_not_allowed", 405)
    REQUEST_TIMEOUT = ("request_timeout", 408)
    BODY_TOO_LARGE = ("body_too_large", 413)
    OVERLOADED = ("overloaded", 429)
    HEADERS_TOO_LARGE = ("headers_too_large", 431)
    INTERNAL_ERROR = ("internal_error", 500)
    REPLICA_FAILED = ("replica_failed", 500)
    POISON_REQUEST = ("poison_request", 500)
    UNAVAILABLE = ("unavailable", 503)
    TOO_MANY_CONNECTIONS = ("too_many_connections", 503)
    TIMEOUT = ("timeout", 504)

    def __init__(self, text: str, status: int) -> None:
        self.text = text
        self.status = status
