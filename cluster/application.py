"""The whole cluster as one Serve application: checked, put together, deployed, and waited for until it can answer.

A command deploys it on the Ray that ``cluster.running_cluster`` holds for it. A Serve config names ``build`` instead:
then Serve deploys the same application, and stops it when it is told to.
"""

import ssl
import time
from collections.abc import Mapping

import httpx
import psutil
import ray
from pydantic import ByteSize
from ray import serve

from cluster.config import ClusterConfig, ConfigError, Mode, Placement
from cluster.deployments import build_application, role_resource
from cluster.directory import stop_directory
from cluster.errors import CrosskvError
from cluster.front_end import FrontEndConfig, chat_template
from cluster.inspect_model import ModelSummary, inspect_model, require_servable
from cluster.model_store import resolve_model
from cluster.openai.api_keys import ApiKey
from cluster.openai.limits import ModelCard
from cluster.ray_cluster import APPLICATION, LOOPBACK, Progress, ray_lives
from cluster.text.tokenizer import TokenizerConfig
from cluster.tls import client_context
from kv_transfer.cluster_token import ClusterToken
from worker.checkpoint.checkpoint import open_checkpoint
from worker.dtype import DTYPES, choose_device, choose_dtype
from worker.models.outline import open_model

READY_SECONDS = 600.0


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
        if not ray_lives():
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
        require_weights(config)
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


def require_deployable(config: ClusterConfig) -> None:
    """Raise for settings that do not fit the model, each other or, of a cluster that is all here, this machine."""
    available = psutil.virtual_memory().total
    if (
        config.ray_address is None
        and choose_device(config.device).type == "cpu"
        and config.kv_cache_memory * config.ranks > available
    ):
        raise ConfigError(
            f"--kv-cache-memory {config.kv_cache_memory.human_readable()} for each of {config.ranks} ranks is more "
            f"than this machine's {ByteSize(available).human_readable()}; lower it"
        )
    require_servable(config, inspect_model(config))


def require_weights(config: ClusterConfig) -> None:
    """Raise ``CheckpointError`` if a cluster that is all here lacks weights: a replica could only fail, and again."""
    if config.ray_address is None:
        open_checkpoint(resolve_model(config.model).weights)


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
    read = open_model(files.weights, config.dtype)[1].read
    return build_application(config, front_end, config.rank_threads, APPLICATION, front_end_resources, read), summary


def _with_dtype(config: ClusterConfig) -> ClusterConfig:
    """Decide ``--dtype auto`` once for all replicas, because their KV must have one type."""
    if config.dtype != "auto" or ray.cluster_resources().get("GPU", 0) > 0:
        return config
    own = DTYPES[inspect_model(config).dtype]
    chosen = choose_dtype("auto", own, choose_device(config.device))
    return config.replace(dtype=str(chosen).removeprefix("torch."))


def _reachable(host: str) -> str:
    """The address to use for a host that means every interface."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104
