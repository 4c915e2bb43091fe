"""prometheus and promtool: what is on the PATH, else Debian's package, unpacked once into build/.

``Prometheus`` is a server of its own that scrapes what it is told, every half second.
"""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from cluster.ports import free_port

REPOSITORY = Path(__file__).parents[1]
SCRAPE_SECONDS = 0.5


def binary(name: str) -> str:
    """``prometheus`` or ``promtool``."""
    found = shutil.which(name)
    if found:
        return found
    target = REPOSITORY / "build" / "prometheus"
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            _download(Path(work))
            (package,) = Path(work).glob("prometheus_*.deb")
            unpacked = Path(work) / "unpacked"
            subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True)
            try:
                unpacked.rename(target)
            except OSError:
                assert target.exists()  # another process was faster
    return str(target / "usr" / "bin" / name)


def _download(directory: Path) -> None:
    """Without root: where apt has no package lists, they are fetched into a directory of our own."""
    if subprocess.run(
        ["apt-get", "download", "prometheus"], cwd=directory, capture_output=True, check=False
    ).returncode:
        state = directory / "apt"
        for name in ("lists/partial", "cache/archives/partial"):
            (state / name).mkdir(parents=True)
        options = ["-o", f"Dir::State::Lists={state}/lists", "-o", f"Dir::Cache={state}/cache"]
        subprocess.run(["apt-get", *options, "update"], cwd=directory, capture_output=True, check=True)
        subprocess.run(["apt-get", *options, "download", "prometheus"], cwd=directory, capture_output=True, check=True)


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of every series of an instant query's result."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=10).json()
        assert answer["status"] == "success", answer
        return [(series["metric"], float(series["value"][1])) for series in answer["data"]["result"]]

    def wait_for(self, expression: str, seconds: float = 20.0) -> float:
        """The value of an expression as soon as it has one that is not 0."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.query(expression)
            if found and found[0][1]:
                return found[0][1]
            assert time.monotonic() < deadline, f"{expression} is {found} after {seconds} s"
            time.sleep(0.1)


@contextmanager
def scraping(targets: list[str], directory: Path, rules: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes ``targets``, as host:port, and evaluates ``rules``."""
    config = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS * 1000:.0f}ms", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "crosskv", "static_configs": [{"targets": targets}]}],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    command = [
        binary("prometheus"),
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_until_ready(f"http://{address}", process, directory / "prometheus.log")
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/-/ready", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"Prometheus did not start:\n{log.read_text()}")
