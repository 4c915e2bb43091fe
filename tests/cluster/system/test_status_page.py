"""The status page of a running cluster, in a real browser, during a load and after it."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from playwright.sync_api import Browser, expect
from prometheus_client.parser import text_string_to_metric_families

from tests.chromium import chromium
from tests.cluster.status_page import picture, refreshed, status_page, value
from tests.cluster.system.conftest import Serving

CLIENTS = 6


@pytest.fixture
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@contextmanager
def loading(base_url: str) -> Iterator[None]:
    """Clients with one request after another, until the block ends."""
    enough = threading.Event()

    def client(number: int) -> None:
        numbers = random.Random(number)
        with httpx.Client(base_url=base_url, timeout=120) as http:
            while not enough.is_set():
                prompt = [numbers.randrange(4, 512) for _ in range(numbers.randint(40, 400))]
                body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0}
                assert http.post("/v1/completions", json=body).status_code == 200

    with ThreadPoolExecutor(CLIENTS) as threads:
        clients = [threads.submit(client, number) for number in range(CLIENTS)]
        try:
            yield
        finally:
            enough.set()
        for one in clients:
            one.result()


def metrics(base_url: str) -> dict[tuple[str, ...], float]:
    """Every sample by its name and its labels' values, in the order of their names."""
    families = text_string_to_metric_families(httpx.get(f"{base_url}/metrics", timeout=10).text)
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in families
        for sample in family.samples
    }


def pairs(replicas: list[dict]) -> dict[tuple[str, str], int]:
    return {
        (flow["prefill_replica"], replica["replica_id"]): flow["payload_bytes"]
        for replica in replicas
        for flow in replica["prefill_transfers"]
        if flow["transfers"]
    }


def moved_by_counters(replicas: list[dict]) -> int:
    return sum(replica["counters"]["lower_bound_bytes"] for replica in replicas)


def test_figures_are_those_of_metrics(browser: Browser, serving: Serving) -> None:
    before = serving.statuses()
    with status_page(browser, serving.base_url) as page:
        with loading(serving.base_url):
            expect(page.locator("#requests tr")).not_to_have_count(0)
            expect(page.locator("#running")).not_to_have_attribute("value", "0")
            picture(page, "load-light")
        serving.wait_until_idle()
        refreshed(page, 2)
        samples = metrics(serving.base_url)
        replicas = serving.statuses()

        def total(name: str, role: str = "decode") -> float:
            return sum(samples[name, replica["replica_id"], role] for replica in replicas if replica["role"] == role)

        assert value(page, "kv-sent") == total("crosskv_kv_transfer_payload_bytes_total") > 0
        assert value(page, "kv-saved") == total("crosskv_kv_transfer_saved_bytes_total")
        assert value(page, "running") == total("crosskv_num_requests_running") == 0
        assert value(page, "waiting") == total("crosskv_num_requests_waiting")
        assert value(page, "hit-share") == total("crosskv_prefix_cache_hits_total")
        # Every byte has a row: of a pair, or of what no pair accounts for.
        rows = page.locator("#flows tr")
        sent = rows.locator("td:nth-last-child(3) data").evaluate_all("all => all.map((one) => Number(one.value))")
        assert sum(sent) == value(page, "kv-sent")
        assert sorted(pairs(replicas).values(), reverse=True) == sent[: len(pairs(replicas))]
        # What the load moved is in the pairs' rows, and nothing of it elsewhere.
        moved = sum(pairs(replicas).values()) - sum(pairs(before).values())
        assert moved == moved_by_counters(replicas) - moved_by_counters(before) > 0
        # A replica in full, block for block.
        tile = page.locator("#roles [role=option]").first
        name = tile.get_attribute("data-name")
        tile.click()
        for term, state in (("Blocks held", "held"), ("Blocks cached", "cached"), ("Blocks free", "free")):
            shown = page.locator(f"#replica dt:text-is('{term}') + dd data").get_attribute("value")
            assert float(shown) == samples["crosskv_kv_cache_blocks", name, name.split("-")[0], state]
        picture(page, "after-light")
        page.get_by_role("button", name="Show all again").click()
        # The journal's last requests, and the chat's own on top of them.
        expect(page.locator("#requests tr")).not_to_have_count(0)
        page.fill("#question", "What is the capital of France?")
        page.fill("#max-tokens", "12")
        page.press("#question", "Enter")
        expect(page.locator("#chat-said")).to_contain_text("The answer is complete")
        expect(page.locator(".message.assistant")).to_contain_text("of KV from prefill-")
        expect(page.locator("#requests tr .generated").first).to_have_text("12")
        page.emulate_media(color_scheme="dark")
        picture(page, "after-dark")
