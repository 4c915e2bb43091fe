"""Starting and stopping a whole cluster: Ray if need be, the Serve application, and the wait until it can answer.

A command holds ``running_cluster`` open for as long as the cluster should live; whatever it started is stopped again.
A Serve config names ``build`` instead: then Serve deploys the same application, and stops it when it is told to.
"""

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx
import ray
from ray import serve
from ray._private import ray_constants

from cluster.config import ClusterConfig, ConfigError, Mode, Placement
from cluster.deployments import build_application, role_resource
from cluster.directory import stop_directory
from cluster.errors import CrosskvError
from cluster.front_end import FrontEndConfig, chat_template
from cluster.inspect_model import ModelSummary, inspect_model, require_servable
from cluster.lifeline import Lifeline, stop_application
from cluster.model_store import resolve_model
from cluster.openai.api_keys import ApiKey
from cluster.openai.limits import ModelCard
from cluster.text.tokenizer import TokenizerConfig
from cluster.tls import client_context
from kv_transfer.cluster_token import ClusterToken
from worker.dtype import DTYPES, choose_device, choose_dtype

APPLICATION = "crosskv"
LOOPBACK = "127.0.0.1"
READY_SECONDS = 600.0
RAY_START_ATTEMPTS = 3
STOP_SECONDS = 30.0
ALIVE_SECONDS = 10.0
GONE_SECONDS = 3.0

Progress = Callable[[str], None]


class ClusterStartError(CrosskvError):
    """The cluster did not come up; the message says which part and why."""


class ClusterLost(CrosskvError):
    """The Ray cluster that carried the application is gone."""


class RunningCluster:
    """A deployed application. ``base_url`` is where its API answers."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.base_url = ""
        self._token = ClusterToken.new()
        self._summary: ModelSummary | None = None

    @property
    def summary(self) -> ModelSummary:
        """The deployed model and its cache."""
        assert self._summary is not None, "nothing is deployed"
        return self._summary

    def deploy(self, config: ClusterConfig) -> None:
        """Deploy ``config`` and wait until it can answer."""
        if config.tls is not None:
            config.tls.server_context()
        application = self._make(config)
        scheme = "http" if config.tls is None else "https"
        self.base_url = f"{scheme}://{_reachable(config.host)}:{config.port}"
        trusted = config.tls.own_context() if config.tls is not None else client_context(None)
        self._progress("starting replicas")
        try:
            serve.run(application, name=APPLICATION, route_prefix=None)
        except RuntimeError as error:
            raise ClusterStartError(f"the replicas did not start: {error}") from error
        self._progress("waiting for an answer")
        self._wait_until_ready(trusted)

    def roll(self, config: ClusterConfig) -> None:
        """Replace every replica by a new one, of each role one after the other; returns when all are there.

        Where a role has several replicas, no request notices.
        """
        serve.run(self._make(config), name=APPLICATION, route_prefix=None)

    def redeploy(self, config: ClusterConfig) -> None:
        """Replace the application by another layout on the same Ray cluster."""
        self.undeploy()
        self.deploy(config)

    def require_alive(self) -> None:
        """Raise ``ClusterLost`` when Ray itself is gone: then nothing would replace a replica that dies."""
        if not _ray_lives():
            raise ClusterLost("Ray has died under the cluster; start it again")

    def undeploy(self) -> None:
        """Stop the application."""
        serve.delete(APPLICATION)
        stop_directory(APPLICATION)

    def _make(self, config: ClusterConfig) -> serve.Application:
        # The front end listens where this process runs, which is where its user looks for it.
        own = ray.get_runtime_context().get_node_id()
        here = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)
        if config.ray_address is None and config.advertised_host == "auto":
            config = config.replace(advertised_host=LOOPBACK)
        if config.cluster_token is None and config.cluster_token_file is None:
            # The same with every deployment: while replicas are replaced in turn, old and new ones need each other.
            config = config.replace(cluster_token=self._token.value)
        application, self._summary = _application(config, {f"node:{here}": 0.001})
        return application

    def _wait_until_ready(self, trusted: ssl.SSLContext) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.base_url}/health", timeout=2.0, verify=trusted).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise ClusterStartError(f"{self.base_url}/health was not 200 within {READY_SECONDS:.0f} s")


@contextmanager
def running_cluster(
    config: ClusterConfig, progress: Progress, later: Sequence[ClusterConfig] = ()
) -> Iterator[RunningCluster]:
    """Start (or join) Ray, deploy, yield the running cluster, and stop everything that was started here.

    A Ray cluster that is started here has room for every configuration of ``later`` instead of the first.
    """
    # Serve reports each of its own steps on the driver; ours say the same.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    progress("starting Ray" if config.ray_address is None else f"joining Ray at {config.ray_address}")
    _connect(config, max(each.ranks * _threads(each) for each in (config, *later)), progress)
    try:
        lifeline = None if config.ray_address is None else Lifeline(APPLICATION)
        progress("starting Serve")
        serve.start(proxy_location="Disabled")
        cluster = RunningCluster(progress)
        try:
            cluster.deploy(config)
            yield cluster
        finally:
            if lifeline is None:
                _while_ray_lives(cluster.undeploy, config.drain_seconds + STOP_SECONDS)
            elif _while_ray_lives(lambda: stop_application(APPLICATION), config.drain_seconds + STOP_SECONDS):
                lifeline.let_go()
    finally:
        if not _bounded(ray.shutdown, STOP_SECONDS if _ray_lives() else GONE_SECONDS):
            # Ray's processes are gone and it waits for them. Our own end takes along what is left of a local cluster.
            os._exit(1)


def build(config: ClusterConfig) -> serve.Application:
    """What a Serve config imports: ``import_path: cluster.application:build``, with settings as its ``args``.

    The environment of the process that builds supplies what ``args`` do not say. No wait for an answer: Serve's own
    status and the front end's ``/health`` tell.
    """
    if config.ray_address is not None:
        raise ConfigError(f"ray_address = {config.ray_address!r}: Serve deploys on its own Ray cluster; remove it")
    resources = role_resource("front-end") if config.placement is Placement.ROLE else {}
    return _application(config, resources)[0]


def _application(
    config: ClusterConfig, front_end_resources: Mapping[str, float]
) -> tuple[serve.Application, ModelSummary]:
    """Check everything that can be checked before replicas start, and put the application together."""
    config = _with_dtype(config)
    summary = inspect_model(config)
    require_servable(config, summary)
    files = resolve_model(config.model)
    tokenizer = TokenizerConfig.from_directory(files.tokenizer)
    chat_template(tokenizer)
    limit = min(config.max_model_len or summary.longest_context, summary.longest_request)
    front_end = FrontEndConfig(
        host=config.host,
        port=config.port,
        source=config.model,
        model=ModelCard(
            name=config.served_model_name or files.name,
            max_model_len=limit,
            vocab_size=summary.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            created=int(time.time()),
            root=config.model,
        ),
        directory=APPLICATION,
        needs_prefill=config.mode is Mode.DISAGGREGATED,
        api_keys=() if config.api_key is None else (ApiKey.of(config.api_key.get_secret_value()),),
        api_key_file=config.api_key_file,
        prefix_cache_per_key=config.prefix_cache_per_key,
        max_body_bytes=int(config.max_body_size),
        # Choices of one request run at once.
        max_choices=min(128, config.max_running_requests),
        max_connections=config.max_connections,
        tls=config.tls,
        token=config.token,
        cluster_token_file=config.cluster_token_file,
        drain_seconds=config.drain_seconds,
        tool_calls=config.tool_call_parser,
        request_timeout=config.request_timeout,
        otlp_traces_endpoint=config.otlp_traces_endpoint,
    )
    return build_application(config, front_end, _threads(config), APPLICATION, front_end_resources), summary


def _bounded(action: Callable[[], None], seconds: float) -> bool:
    """Run ``action``, but wait for it no longer than ``seconds``: calls into a dead Ray may never return."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _while_ray_lives(action: Callable[[], None], seconds: float) -> bool:
    """The same, and no longer than there is a Ray: who signals a whole process group ends Ray together with us."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < deadline and _ray_lives():
        thread.join(1.0)
    return not thread.is_alive()


def _ray_lives() -> bool:
    """Whether Ray answers and knows a node that is alive."""
    alive: list[bool] = []
    answered = _bounded(lambda: alive.extend(node["Alive"] for node in ray.nodes()), ALIVE_SECONDS)
    return answered and any(alive)


def _connect(config: ClusterConfig, threads: int, progress: Callable[[str], None]) -> None:
    """Reach a Ray cluster. A local one is ours alone, listens on loopback, and is stopped with us.

    ``threads`` are those of all ranks that it must have room for. Raises ``CrosskvError`` if Ray does not start.
    """
    # Without it Ray may turn on token authentication and leave a token in the home directory.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    if config.ray_address is not None:
        ray.init(address=config.ray_address, namespace=APPLICATION, log_to_driver=False)
        return
    for attempt in range(1, RAY_START_ATTEMPTS + 1):
        if attempt > 1:
            progress(f"starting Ray, try {attempt} of {RAY_START_ATTEMPTS}")
        try:
            with _loopback_is_meant():
                ray.init(
                    address="local",
                    namespace=APPLICATION,
                    # Logical: every rank gets its share of the real cores, what supervises them takes almost nothing.
                    num_cpus=threads + 4,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address=LOOPBACK,
                    # By itself Ray gives workers way to everything else on the machine; these serve.
                    _system_config={"worker_niceness": 0},
                )
            return
        except Exception as error:
            ray.shutdown()
            if attempt == RAY_START_ATTEMPTS:
                raise CrosskvError(
                    f"Ray did not start in {attempt} tries: {error} A busy machine may be too slow for Ray's own time "
                    "limits: try again when it has less to do, or join a Ray cluster that runs, with --ray-address"
                ) from error


@contextmanager
def _loopback_is_meant() -> Iterator[None]:
    """Have Ray listen on loopback alone when it is told to.

    It takes loopback for a mistake, and listens everywhere, but where clusters of several machines are switched off.
    """
    variable, enabled = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    before = os.environ.get(variable)
    os.environ[variable], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def _with_dtype(config: ClusterConfig) -> ClusterConfig:
    """Decide ``--dtype auto`` once for all replicas, because their KV must have one type."""
    if config.dtype != "auto" or ray.cluster_resources().get("GPU", 0) > 0:
        return config
    own = DTYPES[inspect_model(config).dtype]
    chosen = choose_dtype("auto", own, choose_device(config.device))
    return config.replace(dtype=str(chosen).removeprefix("torch."))


def _threads(config: ClusterConfig) -> int:
    """CPU threads of one rank: as configured, or an equal share of the cores that this process may use."""
    return config.threads or max(1, len(os.sched_getaffinity(0)) // config.ranks)


def _reachable(host: str) -> str:
    """The address to use for a host that means every interface."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104
