import asyncio
import subprocess
import sys
import tomllib
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.engine_client import EngineUnavailable
from cluster.openai.limits import ApiLimits
from cluster.text.tokenizer import Tokenizer
from tests.cluster.scripted_engine import ScriptedEngine, always, emit, prompt_info
from worker.wire.engine_pb2 import Counters, Load, Phases, StatusReply, Submit

pytestmark = pytest.mark.anyio

STATUSES = [
    StatusReply(
        role="decode",
        replica_id="d0",
        load=Load(
            running_requests=3,
            waiting_requests=2,
            receiving_requests=1,
            free_blocks=5,
            cached_blocks=3,
            total_blocks=16,
        ),
        held_blocks=8,
        counters=Counters(
            completed_bytes=1 << 60,
            lower_bound_bytes=1 << 60,
            unshared_bytes=3 << 60,
            failures={"queue_full": 2},
            transfer_seconds=1.5,
            preemptions=4,
            prefix_hits=9,
        ),
    ),
    StatusReply(
        role="prefill",
        replica_id="p0",
        load=Load(total_blocks=4, free_blocks=4),
        counters=Counters(payload_bytes=5, wire_bytes=7),
    ),
]

PHASES = Phases(queue_ms=2, prefill_queue_ms=0.25, prefill_ms=1, transfer_ms=1.5)


def samples(text: str) -> dict[tuple[str, ...], float]:
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in families
        for sample in family.samples
    }


async def test_metrics_of_replicas_are_shown_as_they_are(client) -> None:
    async with client(ScriptedEngine(always([5]), statuses=STATUSES)) as http:
        response = await http.get("/metrics")
        again = samples((await http.get("/metrics")).text)
    assert response.headers["content-type"].startswith("text/plain")
    values = samples(response.text)
    d0 = ("d0", "decode")  # label values in the order of their names: replica, role, state
    assert values["crosskv_num_requests_running", *d0] == 3
    assert values["crosskv_num_requests_waiting", *d0] == 2
    assert values["crosskv_num_requests_receiving", *d0] == 1
    assert [values["crosskv_kv_cache_blocks", *d0, s] for s in ("free", "cached", "held")] == [5, 3, 8]
    assert values["crosskv_kv_cache_usage_ratio", *d0] == 0.5
    assert values["crosskv_kv_transfer_payload_bytes_total", *d0] == 1 << 60
    assert values["crosskv_kv_transfer_saved_bytes_total", *d0] == 2 << 60
    assert values["crosskv_kv_transfer_seconds_total", *d0] == 1.5
    assert values["crosskv_num_preemptions_total", *d0] == 4
    assert values["crosskv_prefix_cache_hits_total", *d0] == 9
    assert values["crosskv_kv_transfer_sent_bytes_total", "p0", "prefill"] == 5
    assert values["crosskv_kv_transfer_wire_bytes_total", "p0", "prefill"] == 7
    # Counters that live elsewhere are not counted again by looking at them.
    assert {k: v for k, v in again.items() if "p0" in k or "d0" in k} == {
        k: v for k, v in values.items() if "p0" in k or "d0" in k
    }


async def test_metrics_of_the_front_end(client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    async with client(ScriptedEngine(always(ids))) as http:
        for body in ({"prompt": [5, 6, 7], "n": 2}, {"prompt": "x", "n": 0}, {"prompt": [5], "stream": True}):
            await http.post("/v1/completions", json=body)
        await http.post("/tokenize", json={})
        await http.get("/nowhere")
        values = samples((await http.get("/metrics")).text)
    assert values["crosskv_requests_total", "200"] == 2
    assert values["crosskv_requests_total", "400"] == 1
    # Of every kind of request.
    assert values["crosskv_request_failures_total", "invalid_request"] == 2
    assert values["crosskv_request_failures_total", "not_found"] == 1
    assert values["crosskv_request_failures_total", "timeout"] == 0
    assert values[("crosskv_ready",)] == 1
    assert values[("crosskv_front_end_requests_in_flight",)] == 0
    assert values[("crosskv_prompt_tokens_total",)] == 4
    assert values[("crosskv_generation_tokens_total",)] == 3 * len(ids)
    assert values[("crosskv_time_to_first_token_seconds_count",)] == 2
    assert values[("crosskv_inter_token_latency_seconds_count",)] == 3 * (len(ids) - 1)
    assert values[("crosskv_e2e_request_latency_seconds_count",)] == 2
    assert values[("crosskv_request_decode_seconds_count",)] == 2
    # One per prompt, and none of a transfer that there was not.
    assert values[("crosskv_request_queue_seconds_count",)] == 2
    assert values[("crosskv_request_transfer_seconds_count",)] == 0


async def test_a_first_token_is_waited_for_from_the_requests_first_byte_on(client) -> None:
    async def slowly() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.2)
        yield b'{"prompt": [5]}'

    async with client(ScriptedEngine(always([5]))) as http:
        assert (await http.post("/v1/completions", content=slowly())).status_code == 200
        values = samples((await http.get("/metrics")).text)
    assert values[("crosskv_time_to_first_token_seconds_sum",)] >= 0.2
    assert values[("crosskv_e2e_request_latency_seconds_sum",)] >= 0.2


async def test_phases_of_a_transfer_are_seconds(client) -> None:
    def script(submit: Submit) -> list:
        phases = Phases(queue_ms=8, prefill_queue_ms=0.25, prefill_ms=3) if submit.token_ids[0] == 7 else PHASES
        return emit(submit, [5], info=prompt_info(submit, phases=phases))

    async with client(ScriptedEngine(script)) as http:
        await http.post("/v1/completions", json={"prompt": [[5], [6], [7]]})
        values = samples((await http.get("/metrics")).text)
    assert values[("crosskv_request_transfer_seconds_count",)] == 2
    assert values[("crosskv_request_transfer_seconds_sum",)] == pytest.approx(2 * 0.0015)
    assert values[("crosskv_request_prefill_queue_seconds_sum",)] == pytest.approx(2 * 0.00025)
    # Of the third, which was computed where it is, there was none.
    assert values[("crosskv_request_queue_seconds_sum",)] == pytest.approx(2 * 0.002 + 0.008)
    assert values[("crosskv_request_prefill_seconds_sum",)] == pytest.approx(2 * 0.001 + 0.003)
    assert values[("crosskv_request_prefill_seconds_count",)] == 3


async def test_metrics_without_replicas_still_show_the_front_end(client) -> None:
    class Deaf(ScriptedEngine):
        async def statuses(self) -> list[StatusReply]:
            raise EngineUnavailable("no replica")

    async with client(Deaf(always([5]))) as http:
        assert "crosskv_requests" in (await http.get("/metrics")).text
        assert (await http.get("/cluster")).status_code == 503


async def test_cluster_has_every_field_as_a_number(client) -> None:
    async with client(ScriptedEngine(always([5]), statuses=STATUSES)) as http:
        first, second = (await http.get("/cluster")).json()
    assert (first["role"], first["replica_id"]) == ("decode", "d0")
    assert first["counters"]["completed_bytes"] == 1 << 60
    assert (first["counters"]["failures"], second["counters"]["failures"]) == ({"queue_full": 2}, {})
    assert first["load"]["free_blocks"] == 5
    assert second["counters"]["steps"] == 0
    assert set(second["load"]) == {field.name for field in Load.DESCRIPTOR.fields}


async def test_health_follows_the_engine(client) -> None:
    engine = ScriptedEngine(always([5]), ready=False)
    async with client(engine) as http:
        for ready in (False, True):
            engine.is_ready = ready
            for path in ("/health", "/ping"):
                assert (await http.get(path)).status_code == (200 if ready else 503)


async def test_models(client) -> None:
    async with client(ScriptedEngine(always([5]))) as http:
        models = (await http.get("/v1/models")).json()
        model = (await http.get("/v1/models/org/tiny")).json()
    assert models == {"object": "list", "data": [model]}
    assert model == {
        "id": "org/tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "crosskv",
        "root": "org/tiny",
        "max_model_len": 64,
    }


async def test_the_release_is_the_packages(client) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    async with client(ScriptedEngine(always([5]))) as http:
        assert (await http.get("/version")).json() == {"version": project["version"]}


async def test_long_texts_do_not_hold_up_short_ones(client) -> None:
    async with client(ScriptedEngine(always([5])), limits=ApiLimits(max_characters_per_token=1 << 20)) as http:
        long = [asyncio.create_task(http.post("/tokenize", json={"prompt": "fox " * 300_000})) for _ in range(4)]
        short = asyncio.create_task(http.post("/v1/completions", json={"prompt": "fox"}))
        done, _ = await asyncio.wait([*long, short], return_when=asyncio.FIRST_COMPLETED)
        assert short in done
        assert all(response.status_code == 200 for response in await asyncio.gather(*long, short))


def test_the_front_end_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, cluster.openai.app, cluster.text.detokenizer, cluster.text.chat_template\n"
        "print([name for name in ('torch', 'transformers', 'ray') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
