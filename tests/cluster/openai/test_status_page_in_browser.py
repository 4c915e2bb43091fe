"""The status page in a real browser, over a front end whose replicas are made up."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect

from cluster.engine_client import EngineUnavailable
from cluster.http_server import http_server
from cluster.openai.api_keys import ApiKey, ApiKeys
from tests.chromium import chromium
from tests.cluster.http_endpoint import Endpoint, listening
from tests.cluster.scripted_engine import ScriptedEngine, always
from tests.cluster.status_page import CONTRASTS, NEWS, picture, refreshed, status_page, value
from worker.wire.engine_pb2 import Counters, Load, PrefillTransfers, StatusReply

TILES = "#roles [role=option]"
KEY = "sk-canary-3f1c"
HOSTILE = "<img src=x onerror=alert(1)>"
EVERYTHING = """() => [...document.querySelectorAll("a, button, input, select, textarea, [tabindex]")]
  .filter((node) => node.checkVisibility() && node.tabIndex >= 0 && !node.disabled)
  .map((node) => (node.dataset.name ?? node.id) || node.textContent)"""
FOCUS = """() => {
  const node = document.activeElement;
  const style = getComputedStyle(node);
  const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
  return [node === document.body ? null : (node.dataset.name ?? node.id) || node.textContent, ring];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


class MadeUp(ScriptedEngine):
    """Replicas that report what a test says."""

    def __init__(self, replicas: Sequence[StatusReply], tokens: Sequence[int] = (5, 6, 7)) -> None:
        super().__init__(always(tokens))
        self.replicas = list(replicas)
        self.failure: Exception | None = None

    async def statuses(self) -> list[StatusReply]:
        if self.failure is not None:
            raise self.failure
        return self.replicas


def made_up(prefill: int, decode: int) -> list[StatusReply]:
    numbers = random.Random(7)
    senders = [f"prefill-{numbers.randrange(16**12):012x}" for _ in range(prefill)]
    replicas = []
    for name in (f"decode-{numbers.randrange(16**12):012x}" for _ in range(decode)):
        flows = [
            PrefillTransfers(prefill_replica=sender, transfers=3, payload_bytes=sent, unshared_bytes=2 * sent)
            for sender in senders
            for sent in [numbers.randrange(10**9)]
        ]
        sent = sum(flow.payload_bytes for flow in flows)
        counters = Counters(
            transfers=3 * prefill,
            payload_bytes=sent + 7,
            completed_bytes=sent,
            lower_bound_bytes=sent,
            unshared_bytes=2 * sent,
        )
        replicas.append(_replica(numbers, "decode", name, prefill, counters, flows))
    return replicas + [_replica(numbers, "prefill", name, 0, Counters(), []) for name in senders]


def _replica(
    numbers: random.Random, role: str, name: str, peers: int, counters: Counters, flows: list[PrefillTransfers]
) -> StatusReply:
    held, cached = numbers.randrange(500), numbers.randrange(500)
    load = Load(
        running_requests=numbers.randrange(40),
        waiting_requests=numbers.randrange(40),
        cached_blocks=cached,
        free_blocks=1000 - held - cached,
        total_blocks=1000,
        queue_limit=64,
        prefill_peers=peers,
    )
    return StatusReply(
        role=role, replica_id=name, load=load, held_blocks=held, counters=counters, prefill_transfers=flows
    )


@pytest.fixture
def served(make_app):
    @contextmanager
    def serve(engine: ScriptedEngine, **options: object) -> Iterator[tuple[Endpoint, uvicorn.Server]]:
        server = http_server(make_app(engine, **options), None, 1.0)
        with listening(server) as endpoint:
            yield endpoint, server

    return serve


def tab_stops(page: Page) -> list[tuple[str, bool]]:
    """What Tab reaches from the top of the page until it leaves it, and whether one sees where the focus is."""
    stops: list[tuple[str, bool]] = []
    for _ in range(200):
        page.keyboard.press("Tab")
        name, ring = page.evaluate(FOCUS)
        if name is None or (stops and name == stops[0][0]):
            return stops
        stops.append((name, ring))
    raise AssertionError(f"no end: {stops}")


def test_keyboard_reaches_everything(browser: Browser, served) -> None:
    with served(MadeUp(made_up(2, 5))) as (endpoint, _), status_page(browser, endpoint.url()) as page:
        httpx.post(f"{endpoint.url()}/v1/completions", json={"prompt": "hello"})
        refreshed(page)
        # Without a click, Tab begins at the top.
        page.locator("#pause").evaluate("button => button.click()")
        stops = tab_stops(page)
        assert all(ring for _, ring in stops), stops
        assert {name for name, _ in stops} == set(page.evaluate(EVERYTHING))
        assert stops[0][0] == "Skip to the figures"
        # One stop for all replicas of a role; arrows go on from there.
        tiles = page.locator(TILES)
        assert tiles.count() == 7
        page.get_by_role("listbox", name="Decode replicas").get_by_role("option").first.focus()
        for key in ("ArrowRight", "ArrowDown", "End", "Home", "End"):
            page.keyboard.press(key)
        last = page.get_by_role("listbox", name="Decode replicas").get_by_role("option").last
        expect(last).to_be_focused()
        page.keyboard.press("Enter")
        expect(last).to_have_attribute("aria-selected", "true")
        expect(page.locator("#replica h3")).to_have_text(last.get_attribute("data-name") or "")
        expect(page.locator("#flows tr")).to_have_count(2)
        page.keyboard.press("Escape")
        expect(page.locator("#replica")).to_be_hidden()
        expect(page.locator("#flows tr")).to_have_count(10)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_stands_out(browser: Browser, served, dark: bool) -> None:
    replicas = made_up(2, 5)
    replicas[0].load.draining = True
    replicas[1].prefill_error = "its layout differs"
    replicas[2].load.prefill_peers = 0
    replicas[3].load.waiting_requests = 64
    engine = MadeUp(replicas)
    with served(engine) as (endpoint, _), status_page(browser, endpoint.url(), dark=dark, refused=True) as page:
        for body in ({"prompt": "hello"}, {"prompt": "x", "temperature": -1}):
            httpx.post(f"{endpoint.url()}/v1/completions", json=body)
        page.locator(TILES).first.click()
        page.fill("#question", "hello")
        page.press("#question", "Enter")
        expect(page.locator("#chat-said")).not_to_be_empty()
        refreshed(page)
        engine.failure = EngineUnavailable("no replica is there")
        expect(page.locator("#state")).to_have_text("out of date")
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 100
        assert [(ratio, text) for ratio, text in contrasts if ratio < 4.5] == []
        # The switch is stronger than the system.
        page.select_option("#theme", "light" if dark else "dark")
        switched = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.select_option("#theme", "auto")
        assert switched != page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_nothing_moves_when_nothing_happens(browser: Browser, served) -> None:
    with served(MadeUp(made_up(2, 5))) as (endpoint, _), status_page(browser, endpoint.url()) as page:
        for _ in range(30):
            httpx.post(f"{endpoint.url()}/v1/completions", json={"prompt": "hello"})
        refreshed(page, 2)
        page.locator("#requests-scroll").evaluate("node => node.scrollTop = 100")
        page.locator(TILES).nth(3).focus()
        page.evaluate(NEWS)
        refreshed(page, 2)
        assert page.evaluate("window.news") == []
        httpx.post(f"{endpoint.url()}/v1/completions", json={"prompt": "hello"})
        refreshed(page, 2)
        assert page.evaluate("window.news") != []
        expect(page.locator(TILES).nth(3)).to_be_focused()
        # What was read stays where it was, though a row came above it.
        assert page.locator("#requests-scroll").evaluate("node => node.scrollTop") >= 100


def test_a_hundred_replicas(browser: Browser, served) -> None:
    replicas = made_up(40, 60)
    sent = sum(replica.counters.completed_bytes for replica in replicas)
    with served(MadeUp(replicas)) as (endpoint, _):
        began = time.monotonic()
        with status_page(browser, endpoint.url(), dark=True) as page:
            expect(page.locator(TILES)).to_have_count(100)
            assert time.monotonic() - began < 30
            assert value(page, "kv-sent") == value(page, "kv-saved") == sent
            rows = page.locator("#flows tr")
            # 2,400 pairs are twelve rows and a sum.
            assert rows.count() == 13
            assert "2,388 more pairs" in rows.last.text_content()
            bytes_shown = rows.locator("td:nth-last-child(3) data").evaluate_all("all => all.map((one) => one.value)")
            assert sum(map(int, bytes_shown)) == sent
            assert page.evaluate("document.querySelectorAll('*').length") < 3000
            picture(page, "hundred")


def test_a_narrow_window(browser: Browser, served) -> None:
    engine = MadeUp(made_up(2, 5))
    with served(engine) as (endpoint, _), status_page(browser, endpoint.url(), width=360) as page:
        httpx.post(f"{endpoint.url()}/v1/completions", json={"prompt": "hello"})
        refreshed(page)
        page.locator(".disclose").first.click()
        picture(page, "narrow")
        assert page.locator("#requests-scroll").evaluate("node => node.scrollWidth - node.clientWidth") <= 0
        page.locator(TILES).first.click()
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 360


def test_a_key_is_asked_for_and_kept_in_this_tab_only(browser: Browser, served) -> None:
    keys = ApiKeys([ApiKey.of(KEY)])
    with (
        served(MadeUp(made_up(1, 1)), api_keys=keys) as (endpoint, _),
        status_page(browser, endpoint.url(), wait="#key-form:not([hidden])", refused=True) as page,
    ):
        expect(page.locator("#key")).to_be_focused()
        expect(page.locator("#main")).to_be_hidden()
        for wrong in ("not-this-one", "söhne"):
            page.fill("#key", wrong)
            page.press("#key", "Enter")
            expect(page.locator("#key-refusal")).not_to_be_empty()
            expect(page.locator("#main")).to_be_hidden()
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        expect(page.locator(TILES)).to_have_count(2)
        assert page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])") == (
            f'[{{"crosskv-api-key":"{KEY}"}},{{}},""]'
        )
        assert KEY not in page.content()
        page.fill("#question", "hello")
        page.press("#question", "Enter")
        expect(page.locator("#chat-said")).to_contain_text("The answer is complete")
        page.reload()
        expect(page.locator(TILES)).to_have_count(2)
        other = page.context.new_page()
        other.goto(endpoint.url())
        expect(other.locator("#key-form")).to_be_visible()
        page.get_by_role("button", name="Forget key").click()
        expect(page.locator("#key-form")).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0


def test_a_server_that_is_gone(browser: Browser, served) -> None:
    engine = MadeUp(made_up(1, 1))
    with served(engine) as (endpoint, server), status_page(browser, endpoint.url(), refused=True) as page:
        refreshed(page)
        engine.failure = EngineUnavailable("no replica is there")
        expect(page.locator("#notice")).to_contain_text("The server answers, but without figures: no replica is there.")
        engine.failure = None
        expect(page.locator("#state")).to_have_text("live")
        expect(page.locator("#notice")).to_be_empty()
        shown = page.locator("#roles").text_content()
        server.should_exit = True
        expect(page.locator("#state")).to_have_text("out of date")
        good = (page.locator("#updated").text_content() or "").removeprefix("figures of ")
        expect(page.locator("#notice")).to_have_text(f"No figures: nobody answers. What is shown is of {good}.")
        assert page.locator("#roles").text_content() == shown


def test_a_replica_that_no_longer_reports_is_shown_as_such(browser: Browser, served) -> None:
    engine = MadeUp(made_up(1, 2))
    with served(engine) as (endpoint, _), status_page(browser, endpoint.url()) as page:
        gone = engine.replicas.pop(0)
        tile = page.locator(f"[data-name={gone.replica_id}]")
        expect(tile).to_have_attribute("data-state", "does not report")
        expect(page.locator(TILES)).to_have_count(3)


def test_words_of_the_server_are_no_markup(browser: Browser, served, tokenizer) -> None:
    replicas = made_up(1, 1)
    replicas[0].prefill_error = HOSTILE
    replicas[0].replica_id = f"decode-{HOSTILE}"
    engine = MadeUp(replicas, tokenizer.encode(HOSTILE))
    with served(engine, max_model_len=512) as (endpoint, _), status_page(browser, endpoint.url()) as page:
        page.fill("#question", HOSTILE)
        page.press("#question", "Enter")
        expect(page.locator("#chat-said")).not_to_be_empty()
        texts = page.locator(".message .text").all_text_contents()
        assert texts == [HOSTILE, HOSTILE]
        expect(page.locator("#problems")).to_contain_text(HOSTILE)
        assert page.locator("img").count() == 0


def test_a_model_without_a_chat_template_continues_texts(browser: Browser, served, tokenizer) -> None:
    engine = MadeUp(made_up(1, 1), tokenizer.encode("one two"))
    with served(engine, chat=False) as (endpoint, _), status_page(browser, endpoint.url(), refused=True) as page:
        for number in (2, 4):
            page.fill("#question", "count: ")
            page.press("#question", "Enter")
            expect(page.locator(".message .quiet.small")).to_have_count(number + number // 2)
        assert page.locator(".message .text").all_text_contents()[1::2] == ["one two", "one two"]
        expect(page.locator("#chat-kind")).to_contain_text("no chat template")
        page.get_by_role("button", name="Clear").click()
        expect(page.locator(".message")).to_have_count(0)
