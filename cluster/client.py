"""What the command line's tools say to a running server over HTTP.

A command makes an ``ApiClient`` for one server and closes it when the command ends. Any OpenAI-compatible server will
do, except for ``status`` and ``request``, which only crosskv has.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self
from urllib.parse import quote

import httpx
from google.protobuf import json_format
from pydantic import BaseModel, TypeAdapter, ValidationError

from cluster.errors import CrosskvError
from cluster.event_data import EventData
from cluster.openai.error_code import ErrorCode
from cluster.timeline import RequestRecord
from cluster.tls import client_context
from worker.wire.engine_pb2 import StatusReply

FRONT_END_TRIES = 64


class ApiError(CrosskvError):
    """The server cannot be reached or answered with an error."""


class Message(BaseModel, frozen=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class TransferUsage(BaseModel, frozen=True):
    """What crosskv adds to a response's usage: the KV bytes that one request moved."""

    payload_bytes: int
    lower_bound_bytes: int
    unshared_bytes: int
    transfer_ms: float


class Usage(BaseModel, frozen=True):
    """Tokens of one request, and its transfer if the server is a crosskv cluster."""

    prompt_tokens: int
    completion_tokens: int
    crosskv: TransferUsage | None = None


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One complete answer. ``time_to_first_token`` is in seconds from sending the question."""

    text: str
    time_to_first_token: float
    usage: Usage | None
    finish_reason: str | None


class ApiFailure(BaseModel):
    """What OpenAI-compatible servers put under ``error``."""

    message: str
    code: str | int | None = None


class _Delta(BaseModel):
    content: str | None = None


class _ChatChoice(BaseModel):
    delta: _Delta
    finish_reason: str | None = None


class _ChatChunk(BaseModel):
    choices: list[_ChatChoice] = []
    usage: Usage | None = None
    error: ApiFailure | None = None


class _ErrorBody(BaseModel):
    error: ApiFailure


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


def error_message(body: str) -> str:
    """Return the message of an error response, or the start of whatever else the body is."""
    try:
        return _ErrorBody.model_validate_json(body).error.message
    except ValidationError:
        return body[:200].strip() or "no explanation"


def event_data(pieces: Iterator[bytes]) -> Iterator[str]:
    """Yield the data of server-sent events up to [DONE]; raise ``ApiError`` if the stream ends without it."""
    events = EventData()
    for piece in itertools.chain(pieces, (b"\n",)):
        for data in events.after(piece):
            if data == "[DONE]":
                return
            yield data
    raise ApiError("the server's answer broke off")


class ApiClient:
    """A connection to one server. Errors of transport and of the server are ``ApiError``s that name the server."""

    def __init__(
        self, base_url: str, api_key: str | None = None, timeout: float = 600.0, ca: Path | None = None
    ) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # OpenAI's clients want /v1 at the end, so people type it here as well.
        base_url = base_url.rstrip("/").removesuffix("/v1")
        self._base_url = base_url
        try:
            self._http = httpx.Client(
                base_url=base_url,
                headers=headers,
                timeout=httpx.Timeout(timeout, connect=10.0),
                verify=client_context(ca),
            )
        except httpx.InvalidURL as error:
            raise ApiError(f"{base_url} is not a URL: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def model_name(self) -> str:
        """Return the name of the first model that the server offers."""
        text = self._get("/v1/models")
        try:
            models = _Models.model_validate_json(text).data
        except ValidationError:
            models = []
        if not models:
            raise ApiError(f"{self._base_url}/v1/models lists no model")
        return models[0].id

    def status(self) -> list[StatusReply]:
        """Return every replica's own report."""
        text = self._get("/cluster")
        try:
            replies = TypeAdapter(list[dict[str, object]]).validate_json(text)
            return [json_format.ParseDict(reply, StatusReply(), ignore_unknown_fields=True) for reply in replies]
        except (ValidationError, json_format.ParseError) as error:
            raise ApiError(f"{self._base_url}/cluster: not a crosskv server: {error}") from None

    def request(self, request_id: str) -> RequestRecord:
        """Return what the journal of the front end that has served a request says about it."""
        path = f"/requests/{quote(request_id, safe='')}"
        for _ in range(FRONT_END_TRIES):
            # Front ends that share a port: each connection reaches one of them.
            response = self._fetch(path, {"Connection": "close"})
            if not _is_of_another_front_end(response):
                break
        try:
            return TypeAdapter(RequestRecord).validate_json(self._text(response))
        except ValidationError as error:
            raise ApiError(f"{self._base_url}{path}: not a crosskv server: {error}") from None

    def last_request(self) -> RequestRecord:
        """Return the same of the request that arrived last at the front end that is reached."""
        text = self._get("/requests?limit=1")
        try:
            records = TypeAdapter(list[RequestRecord]).validate_json(text)
        except ValidationError as error:
            raise ApiError(f"{self._base_url}/requests: not a crosskv server: {error}") from None
        if not records:
            raise ApiError(f"{self._base_url}: no request has arrived since it started")
        return records[0]

    def chat(
        self,
        model: str,
        messages: Sequence[Message],
        on_text: Callable[[str], None],
        *,
        max_tokens: int = 512,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> ChatAnswer:
        """Ask, hand over each piece of the answer as it arrives, and return the whole."""
        body = {
            "model": model,
            "messages": [message.model_dump() for message in messages],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        pieces: list[str] = []
        first = 0.0
        usage: Usage | None = None
        finish_reason: str | None = None
        began = time.perf_counter()
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=_without_none(body)) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise ApiError(f"HTTP {response.status_code}: {error_message(response.text)}")
                for data in event_data(response.iter_bytes()):
                    chunk = _ChatChunk.model_validate_json(data)
                    if chunk.error is not None:
                        raise ApiError(chunk.error.message)
                    usage = chunk.usage or usage
                    for choice in chunk.choices:
                        finish_reason = choice.finish_reason or finish_reason
                        if choice.delta.content:
                            first = first or time.perf_counter() - began
                            pieces.append(choice.delta.content)
                            on_text(choice.delta.content)
        except ValidationError as error:
            raise ApiError(f"{self._base_url}: not a chat completion chunk: {error}") from None
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        return ChatAnswer("".join(pieces), first, usage, finish_reason)

    def _get(self, path: str) -> str:
        return self._text(self._fetch(path))

    def _fetch(self, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        try:
            return self._http.get(path, headers=headers)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _text(self, response: httpx.Response) -> str:
        if response.status_code != httpx.codes.OK:
            message = error_message(response.text)
            if response.status_code == httpx.codes.UNAUTHORIZED:
                message += "; this command sends --api-key, or CROSSKV_API_KEY"
            raise ApiError(f"{self._base_url}{response.request.url.path}: HTTP {response.status_code}: {message}")
        return response.text

    def _unreachable(self, error: httpx.HTTPError) -> ApiError:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return ApiError(
                f"{self._base_url}: its certificate is not to be trusted ({error}); name its issuer with --ca"
            )
        if isinstance(error, httpx.ConnectError):
            return ApiError(f"no server answers at {self._base_url}; start one with crosskv serve, or set --base-url")
        return ApiError(f"{self._base_url}: {type(error).__name__}: {error}")


def _is_of_another_front_end(response: httpx.Response) -> bool:
    try:
        return _ErrorBody.model_validate_json(response.text).error.code == ErrorCode.OTHER_FRONT_END.text
    except ValidationError:
        return False


def _without_none(body: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in body.items() if value is not None}
