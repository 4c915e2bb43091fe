"""A real browser: Chromium, the one on the PATH, or Debian's, unpacked once into build/ with the libraries it needs."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
UNPACKED = Path(__file__).resolve().parents[1] / "build" / "chromium-headless-shell"


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser until the block ends. Playwright keeps an event loop on this thread meanwhile, so no other can run."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    path, environment = (Path(found), {}) if found else _debians()
    with sync_playwright() as playwright:
        # Tests run as root in containers, where Chromium's own sandbox does not; they visit nothing but this machine.
        browser = playwright.chromium.launch(
            executable_path=path, env=os.environ | environment, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


def _debians() -> tuple[Path, dict[str, str]]:
    if not UNPACKED.exists():
        _unpack(UNPACKED)
    libraries = next((UNPACKED / "usr" / "lib").glob("*-linux-gnu"))
    paths = [libraries, *filter(Path.is_dir, libraries.iterdir())]
    environment = {"LD_LIBRARY_PATH": ":".join(map(str, paths)), "FONTCONFIG_FILE": str(UNPACKED / "fonts.conf")}
    return UNPACKED / "usr" / "lib" / "chromium" / "chromium-headless-shell", environment


def _unpack(target: Path) -> None:
    """Fetch Chromium and what this machine lacks for it, without installing anything. Needs apt, but not to be root."""
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        work = Path(directory)
        for place in ("lists/partial", "archives/partial", "root"):
            (work / place).mkdir(parents=True)
        apt = ["apt-get", "-qq", "-o", "Debug::NoLocking=true", "-o", "APT::Sandbox::User="]
        apt += ["-o", f"Dir::State::Lists={work}/lists", "-o", f"Dir::Cache={work}"]
        packages = ["chromium-headless-shell", "fonts-dejavu-core"]
        for command in (["update"], ["install", "--download-only", "--yes", "--no-install-recommends", *packages]):
            subprocess.run([*apt, *command], check=True, capture_output=True, timeout=300)
        root = work / "root"
        for archive in (work / "archives").glob("*.deb"):
            subprocess.run(["dpkg-deb", "--extract", archive, root], check=True, timeout=120)
        fonts = f"<dir>{target}/usr/share/fonts</dir><dir>/usr/share/fonts</dir><cachedir>{target}/fonts</cachedir>"
        usual = "<alias><family>system-ui</family><prefer><family>DejaVu Sans</family></prefer></alias>"
        (root / "fonts.conf").write_text(f"<fontconfig>{fonts}{usual}</fontconfig>\n")
        try:
            root.rename(target)
        except OSError:
            if not target.exists():  # else another test process was faster
                raise
