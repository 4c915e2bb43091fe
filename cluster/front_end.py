"""A front end: one process with one HTTP port, the OpenAI API, and sessions to every decode replica.

Ray Serve starts it, asks after its health and stops it; requests reach its own HTTP server directly. It runs an event
loop in a thread of its own and never imports torch.
"""

import asyncio
import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from prometheus_client import CollectorRegistry

from cluster.directory import DirectoryClient, this_node
from cluster.farewell import Farewell
from cluster.http_connection import ConnectionLimits
from cluster.http_server import http_server
from cluster.journal import forget, new_front_end
from cluster.listener import BACKLOG, bind, turn_away
from cluster.model_store import resolve_model
from cluster.monitoring.exposition import front_end_text
from cluster.openai.api_keys import ApiKey, ApiKeys
from cluster.openai.app import build_app
from cluster.openai.limits import ApiLimits, ModelCard
from cluster.placement_metrics import PlacementMetrics
from cluster.replica_set import ReplicaSet
from cluster.siblings import Siblings
from cluster.text.chat_template import ChatTemplate
from cluster.text.tokenizer import Tokenizer, TokenizerConfig
from cluster.text.tool_calls import ToolCallStyle
from cluster.tls import TlsFiles
from kv_transfer.cluster_token import ClusterToken, token_here

if TYPE_CHECKING:
    from cluster.spans import SpanExport

log = logging.getLogger(__name__)

NOTICE_SECONDS = 1.0
"""Between saying that it will close and closing: load balancers and clients move on meanwhile."""
STOP_SECONDS = 3.0
"""For what follows draining."""
READY_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class FrontEndConfig:
    """What a front end is told. ``source`` is the model argument, resolved on the front end's own machine.

    ``directory`` names the replica directory's namespace. ``api_keys`` are in force beside those of ``api_key_file``.
    """

    host: str
    port: int
    source: str
    model: ModelCard
    directory: str
    needs_prefill: bool
    max_body_bytes: int = 8 << 20
    max_choices: int = 128
    max_connections: int = 2048
    api_keys: tuple[ApiKey, ...] = ()
    api_key_file: Path | None = None
    prefix_cache_per_key: bool = False
    tls: TlsFiles | None = None
    token: ClusterToken | None = None
    cluster_token_file: Path | None = None
    drain_seconds: float = STOP_SECONDS
    tool_calls: ToolCallStyle = ToolCallStyle.AUTO
    request_timeout: float = 600.0
    otlp_traces_endpoint: str | None = None


class FrontEnd:
    """See the module. It listens as soon as a replica can answer; ``stop`` finishes what has begun."""

    def __init__(self, config: FrontEndConfig) -> None:
        self._config = config
        self._tokenizer = Tokenizer.from_directory(resolve_model(config.source).tokenizer)
        self._chat_template = chat_template(self._tokenizer.config)
        self._api_keys = ApiKeys(config.api_keys, config.api_key_file)
        self._tls = None if config.tls is None else config.tls.server_context()
        self._token = token_here(config.token, config.cluster_token_file)
        self._socket = bind(config.host, config.port)
        self._replicas: ReplicaSet | None = None
        self._server: uvicorn.Server | None = None
        self._name = new_front_end()
        self._listening = threading.Event()
        self._farewell = Farewell()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="http", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still serves."""
        return self._thread.is_alive()

    def wait_until_listening(self, seconds: float) -> bool:
        """Wait for the moment from which on clients are answered; whether it came."""
        return self._listening.wait(seconds)

    def stop(self) -> None:
        """Say that it will close, close the port, finish what has begun within ``drain_seconds``, and end."""
        if self._listening.is_set():
            self._farewell.said = True
            time.sleep(min(NOTICE_SECONDS, self._config.drain_seconds))
            turn_away(self._socket)
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(self._config.drain_seconds + STOP_SECONDS)

    async def _serve(self) -> None:
        config, registry = self._config, CollectorRegistry()
        directory = DirectoryClient(config.directory)
        self._replicas = ReplicaSet(
            directory.live,
            directory.departed,
            needs_prefill=config.needs_prefill,
            token=self._token,
            request_timeout=config.request_timeout,
            metrics=PlacementMetrics(registry),
        )
        siblings = Siblings(
            self._name,
            f"{this_node()}:{config.port}",
            lambda: front_end_text(registry, self._name),
            directory.exchange,
        )
        self._replicas.start()
        spans = None if config.otlp_traces_endpoint is None else _span_export(config.otlp_traces_endpoint)
        app = build_app(
            engine=self._replicas,
            tokenizer=self._tokenizer,
            chat_template=self._chat_template,
            model=config.model,
            limits=ApiLimits(max_body_bytes=config.max_body_bytes, max_choices=config.max_choices),
            metrics=registry,
            api_keys=self._api_keys,
            prefix_cache_per_key=config.prefix_cache_per_key,
            tool_calls=config.tool_calls,
            name=self._name,
            siblings=siblings,
            ended=forget if spans is None else spans.export,
        )
        self._server = http_server(
            self._farewell.around(app),
            self._tls,
            config.drain_seconds,
            ConnectionLimits(config.max_connections),
            refused=app.state.metrics.failed,
        )
        following = asyncio.create_task(siblings.follow())
        try:
            # Until something can be answered, a client should see that nobody listens, not an error.
            while not (self._replicas.ready() or self._server.should_exit):  # noqa: ASYNC110 (readiness has no event)
                await asyncio.sleep(READY_POLL_SECONDS)
            self._socket.listen(BACKLOG)
            self._listening.set()
            await self._server.serve([self._socket])
        finally:
            following.cancel()
            with suppress(Exception):
                await directory.remove_front_end(self._name)
            await self._replicas.stop()
            if spans is not None:
                await asyncio.to_thread(spans.close)


def _span_export(endpoint: str) -> "SpanExport":
    """OpenTelemetry is imported only where it is wanted."""
    from cluster.spans import SpanExport  # noqa: PLC0415

    return SpanExport(endpoint)


def chat_template(config: TokenizerConfig) -> ChatTemplate | None:
    """A checkpoint's chat template, if it has one; raises ``CrosskvError`` for one that cannot be compiled."""
    if config.chat_template is None:
        return None
    return ChatTemplate(config.chat_template, config.special_tokens)
