"""Errors as OpenAI's clients know them: a status and ``{"error": {message, type, param, code}}``."""

import math
from http import HTTPStatus

from fastapi import Response
from pydantic import ValidationError
from pydantic_core import ErrorDetails, to_json

from cluster.engine_client import EngineError, EngineOverloaded, EngineTimeout, EngineUnavailable, PoisonRequest
from worker.wire import engine_pb2

_MAX_MESSAGE = 2000
_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_STATUS_OF_KIND = {
    engine_pb2.ERROR_KIND_INVALID: 400,
    engine_pb2.ERROR_KIND_OVERLOADED: 429,
    engine_pb2.ERROR_KIND_TIMEOUT: 504,
    engine_pb2.ERROR_KIND_INTERNAL: 500,
    engine_pb2.ERROR_KIND_UNAVAILABLE: 503,
}


class ApiError(Exception):
    """One request's failure, as its client is told. ``retry_after`` is in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))

    def body(self) -> bytes:
        """Return the JSON document."""
        error = {
            "message": str(self)[:_MAX_MESSAGE],
            "type": _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error"),
            "param": self.param,
            "code": self.code,
        }
        return to_json({"error": error})

    def response(self) -> Response:
        """Return the response to a request that has had none yet."""
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request is wrong: 400."""
    return ApiError(400, message, param=param, code=code)


def not_supported(name: str) -> ApiError:
    """The request asks for something that this server does not have yet: 400 by name."""
    return invalid(f"{name} is not supported yet", param=name, code="unsupported_parameter")


def from_status(status: int, detail: str | None = None, headers: dict[str, str] | None = None) -> ApiError:
    """What the web framework refused: an unknown route, a wrong method."""
    return ApiError(status, detail or HTTPStatus(status).phrase, headers=headers)


def from_validation(error: ValidationError) -> ApiError:
    """The first field that is wrong, as deep inside as the alternatives of its type let one see, and what is wrong."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    first = _param(details[0])
    params = [_param(detail) for detail in details]
    param = max((p for p in params if p == first or p.startswith(f"{first}.")), key=len)
    messages = [_message(detail) for detail in details if _param(detail) == param]
    text = " or ".join(dict.fromkeys(messages))
    if details[0]["type"] == "json_invalid":
        return invalid(f"the request body is not JSON: {text}", code="invalid_json")
    return invalid(f"{param}: {text}" if param else text, param=param or None)


def from_engine(error: EngineError) -> ApiError:
    """What the cluster says about a request that no replica has."""
    if isinstance(error, EngineOverloaded):
        return ApiError(429, str(error), code="overloaded", retry_after=error.retry_after)
    if isinstance(error, EngineUnavailable):
        return ApiError(503, str(error), code="unavailable", retry_after=1)
    if isinstance(error, EngineTimeout):
        return ApiError(504, str(error), code="timeout")
    if isinstance(error, PoisonRequest):
        return ApiError(500, str(error), code="poison_request")
    return ApiError(500, str(error))


def from_output(error: engine_pb2.Error) -> ApiError:
    """What a replica says about a request that it had."""
    status = _STATUS_OF_KIND.get(error.kind, 500)
    retry_after = (error.retry_after_ms / 1000 or 1.0) if status in (429, 503) else None
    return ApiError(status, error.message or HTTPStatus(status).phrase, retry_after=retry_after)


def _param(detail: ErrorDetails) -> str:
    return ".".join(str(part) for part in detail["loc"] if not _is_union_member(part))


def _is_union_member(part: int | str) -> bool:
    """Pydantic adds the name of the alternative that it tried, such as ``str`` or ``list[str]``."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or not part.isidentifier())


def _message(detail: ErrorDetails) -> str:
    message = detail["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]
