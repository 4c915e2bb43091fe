"""Errors as OpenAI's clients know them: a status and ``{"error": {message, type, param, code}}``."""

import math
from http import HTTPStatus

from fastapi import Response
from pydantic import ValidationError
from pydantic_core import ErrorDetails, to_json

from cluster.engine_client import EngineError, EngineOverloaded, EngineTimeout, EngineUnavailable, PoisonRequest
from cluster.openai.error_code import ErrorCode
from worker.wire import engine_pb2

_MAX_MESSAGE = 2000
_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_CODE_OF_KIND = {
    engine_pb2.ERROR_KIND_INVALID: ErrorCode.INVALID_REQUEST,
    engine_pb2.ERROR_KIND_OVERLOADED: ErrorCode.OVERLOADED,
    engine_pb2.ERROR_KIND_TIMEOUT: ErrorCode.TIMEOUT,
    engine_pb2.ERROR_KIND_INTERNAL: ErrorCode.REPLICA_FAILED,
    engine_pb2.ERROR_KIND_UNAVAILABLE: ErrorCode.UNAVAILABLE,
}
_CODE_OF_STATUS = {404: ErrorCode.NOT_FOUND, 405: ErrorCode.METHOD_NOT_ALLOWED}


class ApiError(Exception):
    """One request's failure, as its client is told. ``retry_after`` is in seconds."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))

    @property
    def status(self) -> int:
        """HTTP's."""
        return self.code.status

    def body(self) -> bytes:
        """Return the JSON document."""
        error = {
            "message": str(self)[:_MAX_MESSAGE],
            "type": _TYPES[self.status],
            "param": self.param,
            "code": self.code.text,
        }
        return to_json({"error": error})

    def response(self) -> Response:
        """Return the response to a request that has had none yet."""
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def invalid(message: str, param: str | None = None, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> ApiError:
    """The request is wrong: 400."""
    return ApiError(code, message, param=param)


def not_supported(name: str) -> ApiError:
    """The request asks for something that this server does not have yet: 400 by name."""
    return invalid(f"{name} is not supported yet", param=name, code=ErrorCode.UNSUPPORTED_PARAMETER)


def from_status(status: int, detail: str | None = None, headers: dict[str, str] | None = None) -> ApiError:
    """What the web framework refused: an unknown route, a wrong method."""
    code = _CODE_OF_STATUS.get(status, ErrorCode.INVALID_REQUEST if status < 500 else ErrorCode.INTERNAL_ERROR)
    return ApiError(code, detail or HTTPStatus(status).phrase, headers=headers)


def from_validation(error: ValidationError) -> ApiError:
    """The first field that is wrong, as deep inside as the alternatives of its type let one see, and what is wrong."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    first = _param(details[0])
    params = [_param(detail) for detail in details]
    param = max((p for p in params if p == first or p.startswith(f"{first}.")), key=len)
    messages = [_message(detail) for detail in details if _param(detail) == param]
    text = " or ".join(dict.fromkeys(messages))
    if details[0]["type"] == "json_invalid":
        return invalid(f"the request body is not JSON: {text}", code=ErrorCode.INVALID_JSON)
    return invalid(f"{param}: {text}" if param else text, param=param or None)


def from_engine(error: EngineError) -> ApiError:
    """What the cluster says about a request that no replica has."""
    if isinstance(error, EngineOverloaded):
        return ApiError(ErrorCode.OVERLOADED, str(error), retry_after=error.retry_after)
    if isinstance(error, EngineUnavailable):
        return ApiError(ErrorCode.UNAVAILABLE, str(error), retry_after=1)
    if isinstance(error, EngineTimeout):
        return ApiError(ErrorCode.TIMEOUT, str(error))
    if isinstance(error, PoisonRequest):
        return ApiError(ErrorCode.POISON_REQUEST, str(error))
    return ApiError(ErrorCode.REPLICA_FAILED, str(error))


def from_output(error: engine_pb2.Error) -> ApiError:
    """What a replica says about a request that it had."""
    code = _CODE_OF_KIND.get(error.kind, ErrorCode.REPLICA_FAILED)
    retry_after = (error.retry_after_ms / 1000 or 1.0) if code.status in (429, 503) else None
    return ApiError(code, error.message or HTTPStatus(code.status).phrase, retry_after=retry_after)


def _param(detail: ErrorDetails) -> str:
    return ".".join(str(part) for part in detail["loc"] if not _is_union_member(part))


def _is_union_member(part: int | str) -> bool:
    """Pydantic adds the name of the alternative that it tried, such as ``str`` or ``list[str]``."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or not part.isidentifier())


def _message(detail: ErrorDetails) -> str:
    message = detail["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]
