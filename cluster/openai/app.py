"""The HTTP application of one front end.

``build_app`` makes it from an engine client, a tokenizer and the limits; whoever built it serves it with uvicorn for
as long as the front end lives.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from google.protobuf.message import Message
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from cluster.engine_client import EngineClient, EngineError
from cluster.journal import Journal, TraceContext, forget, new_front_end, trace_context
from cluster.monitoring.exposition import exposition, front_end_text
from cluster.openai.api_keys import ApiKeys
from cluster.openai.authentication import Authentication
from cluster.openai.chat_completions import ChatCompletions
from cluster.openai.completions import Completions
from cluster.openai.description import describe_api
from cluster.openai.error_code import ErrorCode
from cluster.openai.errors import ApiError, from_engine, from_status
from cluster.openai.event_stream import as_api_error
from cluster.openai.exchange import answered, generate, parse
from cluster.openai.limits import ApiLimits, ModelCard
from cluster.openai.metrics import FrontEndMetrics
from cluster.openai.prompts import PromptEncoder
from cluster.openai.protocol import DetokenizeBody, TokenizeBody
from cluster.openai.recent_latency import RecentLatency
from cluster.openai.requests import add_requests
from cluster.openai.sampling import check_model
from cluster.openai.serving import Serving
from cluster.openai.status_page import add_status_page
from cluster.openai.tokenization import detokenize, tokenize, tokenizer_info
from cluster.siblings import Siblings
from cluster.text.chat_template import ChatTemplate
from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_calls import FORMATS, ToolCallStyle, format_of_template
from cluster.timeline import RequestRecord
from cluster.version import VERSION
from worker.wire.engine_pb2 import StatusReply

_logger = logging.getLogger(__name__)
_STATUS_TIMEOUT = 5.0


def build_app(
    *,
    engine: EngineClient,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    model: ModelCard,
    limits: ApiLimits,
    metrics: CollectorRegistry,
    api_keys: ApiKeys | None = None,
    prefix_cache_per_key: bool = False,
    tool_calls: ToolCallStyle = ToolCallStyle.AUTO,
    name: str | None = None,
    siblings: Siblings | None = None,
    ended: Callable[[RequestRecord, TraceContext], None] = forget,
) -> FastAPI:
    """Return the application. ``metrics`` is the registry that ``/metrics`` shows beside the replicas' numbers, and
    beside those of ``siblings``. ``app.state.metrics`` is what it counts with.

    Without ``api_keys`` everybody may use it. With ``prefix_cache_per_key`` each caller has cached prefixes of its own.
    ``tool_calls`` is how the model writes calls of tools. ``ended`` is told of every request that has ended.
    """
    prompts = PromptEncoder(tokenizer, chat_template, model, limits)
    shown = None if chat_template is None else format_of_template(chat_template.source)
    calls = shown if tool_calls is ToolCallStyle.AUTO else FORMATS[tool_calls]
    metrics_here = FrontEndMetrics(metrics)
    metrics_here.ready.set_function(lambda: float(engine.ready()))
    journal = Journal(model.name, name or new_front_end(), ended=ended)
    serving = Serving(engine, tokenizer, prompts, model, limits, metrics_here, journal, prefix_cache_per_key, calls)
    latency = RecentLatency(metrics_here)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        following = asyncio.create_task(latency.follow())
        yield
        following.cancel()
        prompts.close()

    app = FastAPI(
        title="crosskv",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.metrics = metrics_here
    app.add_middleware(Authentication, keys=api_keys or ApiKeys(), refused=metrics_here.failed)
    _add_error_handlers(app, metrics_here)
    _add_generation(app, serving)
    _add_models(app, model)
    _add_tokenization(app, serving)
    _add_operation(app, serving, siblings)
    add_requests(app, journal)
    add_status_page(app, latency)
    return app


def _add_generation(app: FastAPI, serving: Serving) -> None:
    chat = ChatCompletions(serving)
    completions = Completions(serving)

    @app.post("/v1/chat/completions")
    async def chat_completions_route(request: Request) -> Response:
        entry = serving.journal.begin(request.url.path, "chatcmpl", trace_context(request.headers))
        return await generate(request, serving.limits, serving.metrics, entry, chat.handle)

    @app.post("/v1/completions")
    async def completions_route(request: Request) -> Response:
        entry = serving.journal.begin(request.url.path, "cmpl", trace_context(request.headers))
        return await generate(request, serving.limits, serving.metrics, entry, completions.handle)


def _add_models(app: FastAPI, model: ModelCard) -> None:
    description = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "crosskv",
        "root": model.root or model.name,
        "max_model_len": model.max_model_len,
    }

    @app.get("/v1/models")
    async def models_route() -> Response:
        return _json({"object": "list", "data": [description]})

    @app.get("/v1/models/{name:path}")
    async def model_route(name: str) -> Response:
        check_model(name, model)
        return _json(description)


def _add_tokenization(app: FastAPI, serving: Serving) -> None:
    @app.post("/tokenize")
    async def tokenize_route(request: Request) -> Response:
        async def handle(data: bytes) -> dict[str, Any]:
            return await tokenize(parse(TokenizeBody, data), serving)

        return await answered(request, serving.limits.max_body_bytes, serving.metrics, handle)

    @app.post("/detokenize")
    async def detokenize_route(request: Request) -> Response:
        async def handle(data: bytes) -> dict[str, Any]:
            return detokenize(parse(DetokenizeBody, data), serving)

        return await answered(request, serving.limits.max_body_bytes, serving.metrics, handle)

    @app.get("/tokenizer_info")
    async def tokenizer_info_route() -> Response:
        return _json(tokenizer_info(serving))


def _add_operation(app: FastAPI, serving: Serving, siblings: Siblings | None) -> None:
    description = describe_api()

    @app.get("/openapi.json")
    async def description_route() -> Response:
        return _json(description)

    @app.get("/version")
    async def version_route() -> Response:
        return _json({"version": VERSION})

    @app.get("/ping")
    @app.get("/health")
    async def health_route() -> Response:
        return Response(status_code=200 if serving.engine.ready() else 503)

    @app.get("/metrics")
    async def metrics_route() -> Response:
        statuses = None
        try:
            if siblings is None or siblings.shows_replicas:
                statuses = await _statuses(serving.engine)
        except ApiError as error:  # what is measured here is worth showing all the same
            _logger.warning("metrics are without the replicas' part: %s", error)
        front_ends = [front_end_text(serving.metrics.registry)] if siblings is None else siblings.metrics()
        return Response(exposition(front_ends, statuses), media_type=CONTENT_TYPE_LATEST)

    @app.get("/cluster")
    async def cluster_route() -> Response:
        return _json([_as_dict(status) for status in await _statuses(serving.engine)])


def _add_error_handlers(app: FastAPI, metrics: FrontEndMetrics) -> None:
    def refused(error: ApiError) -> Response:
        metrics.failed(error)
        return error.response()

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return refused(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        detail = f"{request.method} {request.url.path}: {error.detail}"
        return refused(from_status(error.status_code, detail, dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        return refused(as_api_error(error))


async def _statuses(engine: EngineClient) -> list[StatusReply]:
    try:
        return await asyncio.wait_for(engine.statuses(), _STATUS_TIMEOUT)
    except TimeoutError:
        raise ApiError(ErrorCode.TIMEOUT, f"the replicas have not reported within {_STATUS_TIMEOUT} s") from None
    except EngineError as error:
        raise from_engine(error) from None


def _json(content: Any) -> Response:
    return Response(to_json(content), media_type="application/json")


def _as_dict(message: Message) -> dict[str, Any]:
    """Return every field under its name in the .proto file; integers stay numbers, which protobuf's JSON makes text."""
    fields = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, Message):
            value = _as_dict(value)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = dict(value)
        elif field.message_type is not None:
            value = [_as_dict(one) for one in value]
        fields[field.name] = value
    return fields
