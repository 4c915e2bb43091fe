from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from cluster.journal import TraceContext, forget
from cluster.openai.api_keys import ApiKeys
from cluster.openai.app import build_app
from cluster.openai.limits import ApiLimits, ModelCard
from cluster.text.chat_template import ChatTemplate
from cluster.text.tokenizer import Tokenizer
from cluster.timeline import RequestRecord
from tests.cluster.scripted_engine import ScriptedEngine
from tests.cluster.tiny_tokenizer import write_checkpoint

MODEL = ModelCard("org/tiny", max_model_len=64, vocab_size=512, eos_token_ids=frozenset({0, 2}), created=1_700_000_000)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_directory(checkpoint)


@pytest.fixture(scope="session")
def make_app(tokenizer: Tokenizer) -> Callable[..., FastAPI]:
    def make(
        engine: ScriptedEngine,
        *,
        chat: bool = True,
        limits: ApiLimits | None = None,
        api_keys: ApiKeys | None = None,
        prefix_cache_per_key: bool = False,
        ended: Callable[[RequestRecord, TraceContext], None] = forget,
        **model: int,
    ) -> FastAPI:
        template = ChatTemplate(tokenizer.config.chat_template or "", tokenizer.config.special_tokens) if chat else None
        return build_app(
            engine=engine,
            tokenizer=tokenizer,
            chat_template=template,
            model=replace(MODEL, **model),
            limits=limits or ApiLimits(),
            metrics=CollectorRegistry(),
            api_keys=api_keys,
            prefix_cache_per_key=prefix_cache_per_key,
            ended=ended,
        )

    return make


@pytest.fixture
def client(make_app: Callable[..., FastAPI]) -> Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]:
    @asynccontextmanager
    async def connect(engine: ScriptedEngine, **options: object) -> AsyncGenerator[httpx.AsyncClient, None]:
        transport = httpx.ASGITransport(make_app(engine, **options))
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
            yield http

    return connect
