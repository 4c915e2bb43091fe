import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from cluster.farewell import Farewell

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_before_its_end_a_front_end_is_unhealthy_but_answers_on_connections_that_it_then_closes() -> None:
    app = FastAPI()

    @app.get("/health")
    @app.get("/v1/models")
    async def ok() -> str:
        return "ok"

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts():
            yield b"one "
            farewell.said = True
            yield b"two"

        return StreamingResponse(parts())

    farewell = Farewell()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(farewell.around(app)), base_url="http://f") as client:
        assert (await client.get("/health")).status_code == 200
        assert "connection" not in (await client.get("/v1/models")).headers
        assert (await client.get("/stream")).text == "one two"
        for path, status in (("/health", 503), ("/v1/models", 200), ("/missing", 404)):
            response = await client.get(path)
            assert response.status_code == status
            assert response.headers["connection"] == "close"
