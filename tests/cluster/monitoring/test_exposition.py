"""What is shown at ``/metrics``: every number once, however many front ends are asked."""

import subprocess
from functools import partial

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from cluster.directory import Directory
from cluster.monitoring.definitions import FRONT_END_METRICS, REPLICA_METRICS, REPLICAS
from cluster.monitoring.exposition import exposition, front_end_text
from cluster.openai.error_code import ErrorCode
from cluster.openai.errors import ApiError
from cluster.openai.metrics import FrontEndMetrics
from cluster.placement_metrics import PlacementMetrics
from cluster.siblings import FrontEndReport, Siblings
from tests.prometheus import binary
from worker.failure import Failure, TransferFailure
from worker.wire.engine_pb2 import Counters, Load, StatusReply

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def decode(name: str, **counters: object) -> StatusReply:
    load = Load(running_requests=2, free_blocks=3, cached_blocks=4, total_blocks=12)
    return StatusReply(role="decode", replica_id=name, load=load, held_blocks=5, counters=Counters(**counters))


REPLICA_REPORTS = [
    decode(
        "d0",
        payload_bytes=130,
        completed_bytes=100,
        lower_bound_bytes=100,
        unshared_bytes=250,
        retransmitted_bytes=20,
        transfers=4,
        failures={"queue_full": 3, "step": 1},
        transfer_failures={"broken": 2, "busy": 7},
    ),
    decode("d1", completed_bytes=10, lower_bound_bytes=10, unshared_bytes=20, payload_bytes=10, transfers=1),
    StatusReply(
        role="prefill",
        replica_id="p0",
        load=Load(running_requests=1, free_blocks=8, total_blocks=8),
        counters=Counters(payload_bytes=140, wire_bytes=150, transfers=5, requests_finished=5),
    ),
]


def total(texts: list[bytes], name: str, **labels: str) -> float:
    """``sum(name{labels})`` over everything that was scraped."""
    return sum(
        sample.value
        for text in texts
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_what_two_roles_count_of_one_thing_is_not_added_up() -> None:
    shown = [exposition([], REPLICA_REPORTS)]
    assert total(shown, "crosskv_kv_transfers_total") == 5
    assert total(shown, "crosskv_kv_transfer_payload_bytes_total") == 110
    assert total(shown, "crosskv_kv_transfer_lower_bound_bytes_total") == 110
    assert total(shown, "crosskv_kv_transfer_saved_bytes_total") == 160
    assert total(shown, "crosskv_kv_transfer_received_bytes_total") == 140
    assert total(shown, "crosskv_kv_transfer_sent_bytes_total") == 140
    assert total(shown, "crosskv_kv_transfer_wire_bytes_total") == 150
    assert total(shown, "crosskv_num_requests_running", role="decode") == 4
    assert total(shown, "crosskv_num_requests_running", role="prefill") == 1
    assert total(shown, "crosskv_kv_cache_blocks") == 12 + 12 + 8
    assert total(shown, "crosskv_kv_cache_blocks", state="held") == 10
    assert total(shown, "crosskv_replicas", role="decode") == 2
    assert total(shown, "crosskv_replicas", role="colocated") == 0


def test_failures_are_told_apart_by_reasons_that_are_all_shown() -> None:
    shown = [exposition([], REPLICA_REPORTS)]
    assert total(shown, "crosskv_replica_requests_refused_total", reason="queue_full") == 3
    assert total(shown, "crosskv_replica_requests_refused_total") == 3
    assert total(shown, "crosskv_replica_requests_failed_total", reason="step") == 1
    assert total(shown, "crosskv_replica_requests_failed_total") == 1
    assert total(shown, "crosskv_kv_transfers_failed_total", reason="broken") == 2
    # Every reason is there from the start, so that the first failure is an increase.
    text = shown[0].decode()
    for failure in Failure:
        name = "refused" if failure.refused else "failed"
        assert f'crosskv_replica_requests_{name}_total{{reason="{failure}",replica="d1",role="decode"}} 0.0' in text
    for reason in TransferFailure:
        assert f'crosskv_kv_transfers_failed_total{{reason="{reason}",replica="d1",role="decode"}}' in text


class FrontEnds:
    """Front ends of one application at some addresses, which share one directory."""

    def __init__(self, *addresses: str) -> None:
        self.directory = Directory()
        self.metrics: list[FrontEndMetrics] = []
        self.siblings: list[Siblings] = []
        for number, address in enumerate(addresses):
            registry = CollectorRegistry()
            PlacementMetrics(registry)
            self.metrics.append(FrontEndMetrics(registry))
            text = partial(front_end_text, registry, f"f{number}")
            self.siblings.append(Siblings(f"f{number}", address, text, self._exchange))

    async def _exchange(self, report: FrontEndReport) -> tuple[FrontEndReport, ...]:
        return self.directory.exchange(report)

    async def meet(self) -> None:
        for _ in range(3):
            for one in self.siblings:
                await one.exchange()

    def scrape(self, number: int) -> bytes:
        """What one of them answers."""
        one = self.siblings[number]
        return exposition(one.metrics(), REPLICA_REPORTS if one.shows_replicas else None)


async def test_whoever_answers_at_a_shared_address_answers_for_all() -> None:
    front_ends = FrontEnds("a:8000", "a:8000")
    front_ends.metrics[0].requests.labels("200").inc(3)
    front_ends.metrics[1].requests.labels("200").inc(4)
    await front_ends.meet()
    for answer in (front_ends.scrape(0), front_ends.scrape(1)):
        assert total([answer], "crosskv_requests_total", status="200") == 7
        assert total([answer], "crosskv_requests_total", status="200", front_end="f1") == 4
        assert total([answer], "crosskv_kv_transfer_payload_bytes_total") == 110
    assert front_ends.scrape(0).count(b"# TYPE crosskv_requests_total ") == 1


async def test_several_addresses_are_scraped_and_nothing_is_there_twice() -> None:
    front_ends = FrontEnds("b:8000", "a:8000", "a:8000", "c:8000")
    for metrics in front_ends.metrics:
        metrics.generation_tokens.inc(10)
    await front_ends.meet()
    for at_a in (1, 2):
        scraped = [front_ends.scrape(number) for number in (0, at_a, 3)]
        assert total(scraped, "crosskv_generation_tokens_total") == 40
        assert total(scraped, "crosskv_kv_transfer_payload_bytes_total") == 110
        assert total(scraped, "crosskv_replicas") == 3


async def test_the_next_address_takes_over_when_the_first_is_gone() -> None:
    front_ends = FrontEnds("a:8000", "b:8000", "c:8000")
    await front_ends.meet()
    assert [one.shows_replicas for one in front_ends.siblings] == [True, False, False]
    front_ends.directory.remove_front_end("f0")
    for one in front_ends.siblings[1:]:
        await one.exchange()
    assert [one.shows_replicas for one in front_ends.siblings[1:]] == [True, False]


async def test_a_directory_that_does_not_answer_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    front_ends = FrontEnds("a:8000", "b:8000")
    await front_ends.meet()

    async def fail(_: FrontEndReport) -> tuple[FrontEndReport, ...]:
        raise TimeoutError

    front_ends.siblings[1]._exchange = fail
    await front_ends.siblings[1].exchange()
    assert not front_ends.siblings[1].shows_replicas
    assert "does not answer" in caplog.text


def test_every_metric_is_shown_as_it_is_defined_and_promtool_agrees() -> None:
    front_ends = FrontEnds("a:8000")
    front_ends.metrics[0].failed(ApiError(ErrorCode.TIMEOUT, "late"))
    text = front_ends.scrape(0)
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    metrics = (*FRONT_END_METRICS, *REPLICA_METRICS, REPLICAS)
    assert families.keys() == {metric.name for metric in metrics}
    for metric in metrics:
        family = families[metric.name]
        assert (family.type, family.documentation) == (metric.kind.value, metric.help)
        assert family.samples, f"{metric.name} is not there from the start"
        for sample in family.samples:
            own = sample.labels.keys() - {"front_end", "role", "replica", "le"}
            assert own == set(metric.label_names) - {"role"}, metric.name
    assert total([text], "crosskv_request_failures_total", code="timeout") == 1
    finished = subprocess.run([binary("promtool"), "check", "metrics"], input=text, capture_output=True, check=False)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, b"", b"")
