"""vLLM's prefill and decode servers with NIXL between them, behind one address: a peer for ``benchmarks.serving``.

    python -m benchmarks.nixl_pair --port 18400 --nixl DIR [--pin] -- VENV/bin/vllm serve MODEL --max-model-len 4096 …

``DIR`` is where ``pip install --no-deps --target DIR nixl nixl-cu12`` has put NIXL. Everything behind ``--`` is the
command of either server, without its port. Each gets one core for its computation, by ``VLLM_CPU_OMP_THREADS_BIND``. As
shipped vLLM's connector then binds the main threads of both to the last core; with ``--pin`` all threads of a server go
to the server's own core as soon as it answers. A request first goes to the prefill server for one token that stays
there, and with what comes back to the decode server, which fetches the blocks: the protocol of vLLM's NixlConnector.
Ends with its servers on SIGINT and SIGTERM.
"""

import argparse
import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

START_SECONDS = 420.0
STAY = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
ROLES = ("kv_producer", "kv_consumer")


def server(command: Sequence[str], nixl: str, role: str, port: int, core: int) -> "subprocess.Popen[bytes]":
    """Start one of the two."""
    connector = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    return subprocess.Popen(
        [*command, "--port", str(port), "--kv-transfer-config", json.dumps(connector)],
        env=os.environ
        | {
            "PYTHONPATH": nixl,
            "UCX_TLS": "tcp,shm,self,cma",
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 100),
        },
    )


async def until_healthy(process: "subprocess.Popen[bytes]", url: str) -> None:
    """Raises SystemExit if it ends, and TimeoutError if it takes too long."""
    async with asyncio.timeout(START_SECONDS), httpx.AsyncClient() as client:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"the server at {url} ended with {process.returncode}")
            try:
                if (await client.get(f"{url}/health")).is_success:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.2)


def pin(process: int, core: int) -> None:
    """All threads of a process and its descendants."""
    tree = psutil.Process(process)
    for one in (tree, *tree.children(recursive=True)):
        for thread in one.threads():
            os.sched_setaffinity(thread.id, {core})


def proxy(prefill: str, decode: str) -> FastAPI:
    """What clients see."""
    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
    app = FastAPI()

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked: dict[str, Any] = await request.json()
        first = {name: value for name, value in asked.items() if name not in ("stream", "stream_options")}
        stays = first | {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": STAY}
        prefilled = await client.post(f"{prefill}/v1/completions", json=stays)
        if not prefilled.is_success:
            return Response(prefilled.content, prefilled.status_code, media_type="application/json")
        fetches = asked | {"kv_transfer_params": prefilled.json()["kv_transfer_params"]}

        async def answer() -> AsyncIterator[bytes]:
            async with client.stream("POST", f"{decode}/v1/completions", json=fetches) as response:
                async for part in response.aiter_raw():
                    yield part

        kind = "text/event-stream" if asked.get("stream") else "application/json"
        return StreamingResponse(answer(), media_type=kind)

    return app


@asynccontextmanager
async def pair(command: Sequence[str], nixl: str, port: int, is_pinned: bool) -> AsyncIterator[list[str]]:
    """Both servers, healthy; their addresses. They end with the context."""
    available = sorted(os.sched_getaffinity(0))
    cores = (available[0], available[-1])
    started = [
        server(command, nixl, role, port + 1 + number, core)
        for number, (role, core) in enumerate(zip(ROLES, cores, strict=True))
    ]
    try:
        addresses = [f"http://127.0.0.1:{port + 1 + number}" for number in range(len(started))]
        for process, url, core in zip(started, addresses, cores, strict=True):
            await until_healthy(process, url)
            if is_pinned:
                pin(process.pid, core)
        yield addresses
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)


async def run(command: Sequence[str], nixl: str, port: int, is_pinned: bool) -> None:
    async with pair(command, nixl, port, is_pinned) as (prefill, decode):
        await uvicorn.Server(uvicorn.Config(proxy(prefill, decode), port=port, log_level="warning")).serve()


def main() -> None:
    """Run until told to end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--nixl", metavar="DIR", required=True)
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    asyncio.run(run(arguments.command, arguments.nixl, arguments.port, arguments.pin))


if __name__ == "__main__":
    main()
