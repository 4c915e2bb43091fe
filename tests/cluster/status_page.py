"""The status page as a browser shows it, and everything that the browser has to complain about."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, ConsoleMessage, Page, expect

PICTURES = Path(__file__).resolve().parents[2] / "build" / "status-page"
INTERVAL_MS = 2000
PATIENCE_MS = 30_000
SHOWN = "#main:not([hidden])"
NO_ANSWER = "Failed to load resource: "
"""What Chromium writes by itself when a request is refused or nobody is there."""

# Tests share the machine.
expect.set_options(timeout=PATIENCE_MS)

CONTRASTS = """() => {
  const channels = (colour) => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (rgb) => {
    const linear = rgb.slice(0, 3).map((c) => (c <= 10.31 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = channels(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
      if (colour[3] !== 0) throw new Error(`a half transparent background: ${at.outerHTML.slice(0, 80)}`);
    }
    throw new Error("no background");
  };
  const found = [];
  const look = (text, node, colour) => {
    const [a, b] = [luminance(channels(colour)), luminance(ground(node))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), text.trim().slice(0, 40)]);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (walker.currentNode.data.trim() === "" || !node.checkVisibility() || node.closest("script, .hidden")) continue;
    look(walker.currentNode.data, node, getComputedStyle(node).color);
  }
  for (const node of document.querySelectorAll("[placeholder]")) {
    look(node.placeholder, node, getComputedStyle(node, "::placeholder").color);
  }
  return found;
}"""

NEWS = """() => {
  window.news = [];
  new MutationObserver((records) => {
    for (const { type, target, attributeName } of records) {
      const node = target.nodeType === Node.TEXT_NODE ? target.parentElement : target;
      if (node.id !== "updated") window.news.push(`${type} ${attributeName ?? ""} of ${node.outerHTML.slice(0, 120)}`);
    }
  }).observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
}"""


@contextmanager
def status_page(
    browser: Browser, url: str, *, width: int = 1440, dark: bool = False, refused: bool = False, wait: str = SHOWN
) -> Iterator[Page]:
    """The page at ``url``. It is an error if the console has anything to say, such as a violation of the policy.

    ``refused``: the test has requests refused, of which the console speaks.
    """
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
    )
    complaints: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if not (refused and message.text.startswith(NO_ANSWER)):
            complaints.append(f"{message.type}: {message.text}")

    try:
        page = context.new_page()
        page.on("console", note)
        page.on("pageerror", lambda error: complaints.append(f"raised: {error}"))
        # Time goes on as everywhere, but for what refreshed() skips.
        page.clock.install()
        page.goto(url)
        page.wait_for_selector(wait)
        yield page
        assert complaints == []
    finally:
        context.close()


def picture(page: Page, name: str) -> None:
    """Keep what the page looks like now, for people."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)


def value(page: Page, name: str) -> float:
    """A figure, exactly."""
    return float(page.locator(f"#{name}").get_attribute("value") or "nan")


def refreshed(page: Page, times: int = 1) -> None:
    """Wait until the page has asked the server so often again and shows what it said: the time of it comes last."""
    for _ in range(times):
        before = page.locator("#updated").text_content()
        page.clock.fast_forward(INTERVAL_MS)
        page.wait_for_function("before => document.getElementById('updated').textContent !== before", arg=before)
