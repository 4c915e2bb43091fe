"""One cluster's settings.

A ``ClusterConfig`` is made by a command from its flags, the environment and a YAML file, or by a test from keyword
arguments. The application reads it to deploy the replicas and derives each engine's own settings from it. It never
changes; another layout is another ``ClusterConfig``.
"""

import difflib
import json
import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import ByteSize, Field, SecretStr, TypeAdapter, ValidationError, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from cluster.errors import CrosskvError
from cluster.text.tool_calls import ToolCallStyle
from cluster.tls import TlsFiles
from kv_transfer.cluster_token import ClusterToken
from kv_transfer.transport import Transport
from worker.config import EngineConfig, Role

ENVIRONMENT_PREFIX = "CROSSKV_"
SECRETS = frozenset({"api_key", "cluster_token"})
"""Fields that are no flags, because everybody on a machine can read a command line."""


class ConfigError(CrosskvError):
    """A setting that cannot be used. The message names the setting, where it came from, and the value."""


class Mode(StrEnum):
    """How the two phases of a request are placed."""

    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"


class Placement(StrEnum):
    """Which nodes of a Ray cluster a replica may be placed on."""

    ANY = "any"
    ROLE = "role"


class ClusterConfig(BaseSettings):
    """Every field is a flag (``--block-size``), a YAML key (``block_size``) and a variable (``CROSSKV_BLOCK_SIZE``).

    Only ``SECRETS`` are no flags.

    ``load`` applies the order flag, environment, YAML, default. The constructor knows no YAML file; its keyword
    arguments come before the environment.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", validate_default=False
    )

    model: str = Field(
        min_length=1,
        description="smollm2, a directory with safetensors, a .gguf file, or a Hugging Face hub id.",
    )
    served_model_name: str | None = Field(None, description="The model's name in the API. Default: the model's own.")
    tool_call_parser: ToolCallStyle = Field(
        ToolCallStyle.AUTO, description="How the model writes calls of tools. auto: as its chat template shows it."
    )
    mode: Mode = Field(Mode.DISAGGREGATED, description="Prefill and decode apart, or one engine that does both.")
    prefill_replicas: int = Field(1, ge=1, le=1024, description="Number of prefill replicas.")
    decode_replicas: int = Field(1, ge=1, le=1024, description="Number of decode (or colocated) replicas.")
    max_prefill_replicas: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Prefill replicas are added up to this number, by queued prompt tokens, and removed again down to "
        "--prefill-replicas. Default: their number stays.",
    )
    max_decode_replicas: int | None = Field(
        None, ge=1, le=1024, description="The same for decode (or colocated) replicas, by their use of KV and seats."
    )
    scale_prefill_at: int = Field(
        8192, ge=1, description="Queued prompt tokens per prefill replica beyond which there should be another."
    )
    scale_decode_at: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Part of KV blocks, or of --max-running-requests, in use per decode replica beyond which there "
        "should be another.",
    )
    scale_up_seconds: float = Field(
        10.0, ge=0, le=86400, description="Seconds that a role must need more replicas before it gets them."
    )
    scale_down_seconds: float = Field(
        300.0, ge=0, le=86400, description="Seconds that a role must need fewer replicas before some are drained."
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="Ranks that each replica is split over, a process each, with a GPU each if there are.",
    )
    prefill_tensor_parallel_size: int | None = Field(
        None, ge=1, le=64, description="The same for prefill replicas alone. Default: --tensor-parallel-size."
    )
    front_ends: int = Field(1, ge=1, le=1024, description="Number of front ends. Those on one machine share the port.")
    host: str = Field("127.0.0.1", min_length=1, description="Address that the API listens on.")
    api_key_file: Path | None = Field(
        None,
        description="File of the API keys that requests must have, one name:key or key a line. It is read again when "
        "it changes.",
    )
    api_key: SecretStr | None = Field(
        None, min_length=1, description="One more API key. Default: everybody may use the API."
    )
    tls_certificate: Path | None = Field(
        None, description="PEM file with the API's certificate, intermediate ones behind it. Default: plain HTTP."
    )
    tls_key: Path | None = Field(None, description="PEM file with the certificate's private key, without a password.")
    prefix_cache_per_key: bool = Field(
        False, description="Never reuse KV of one API key's prompts for another's, as if each had a cache_salt."
    )
    port: int = Field(8000, ge=1, le=65535, description="Port that the API listens on.")
    max_body_size: Annotated[ByteSize, Field(ge=1 << 10, le=1 << 30)] = Field(
        ByteSize(8 << 20), description="Largest body of a request to the API: 8MiB, or bytes."
    )
    max_connections: int = Field(
        2048, ge=1, le=1 << 20, description="Connections to the API at a time; further clients get 503."
    )
    advertised_host: str = Field(
        "auto",
        min_length=1,
        description="Address under which replicas reach each other. auto: by which Ray knows each replica's node, "
        "loopback if Ray is started here.",
    )
    placement: Placement = Field(
        Placement.ANY,
        description="Where replicas go: any node, or by role: each takes 1 of its node's Ray resource "
        "crosskv-prefill, crosskv-decode or crosskv-colocated, and of a Serve config the front end crosskv-front-end.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of weights and KV. auto: the checkpoint's own; float32 on a CPU without 16-bit units.",
    )
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N.")
    decode_graphs: bool = Field(
        True,
        description="Launch a decode step of a plain decoder as a whole: a CUDA graph, or recorded calls on a CPU.",
    )
    kv_sharing: str = Field(
        "model",
        description="Which layers share KV: model (as the checkpoint declares), none, every:2 (layer 2k+1 uses 2k), "
        "after:17 (later layers use 17), or a JSON file that maps layer names to target names.",
    )
    block_size: int = Field(16, ge=1, le=1024, description="Tokens per KV block.")
    kv_cache_memory: Annotated[ByteSize, Field(gt=0)] = Field(
        ByteSize(1 << 30), description="KV memory per rank: 512MiB, 40GiB, or bytes."
    )
    max_model_len: int | None = Field(None, ge=1, description="Longest prompt plus output. Default: the model's own.")
    max_batched_tokens: int = Field(1024, ge=1, description="Tokens that one engine step may compute.")
    max_running_requests: int = Field(64, ge=1, description="Requests that one engine runs at once.")
    max_waiting_requests: int = Field(1024, ge=1, description="Requests that may queue before new ones get 429.")
    prefix_caching: bool = Field(True, description="Reuse KV of prompts that begin alike.")
    state_checkpoint_blocks: int = Field(
        4,
        ge=1,
        le=1024,
        description="Of a recurrent layer's state, keep one per so many blocks of tokens for prefix caching.",
    )
    local_prefill_threshold: int = Field(
        0, ge=0, description="Decode replicas prefill uncached suffixes up to this many tokens themselves."
    )
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads per rank. Default: a fair share.")
    bind_cores: bool = Field(
        False,
        description="Give the threads of each rank cores of their own, if enough are free. Not where containers share "
        "cores: they do not see each other's ranks.",
    )
    max_prefill_streams: int = Field(16, ge=1, le=1024, description="Prompts that one prefill replica accepts at once.")
    transport: Transport = Field(
        Transport.GRPC,
        description="How KV travels: grpc, or torch for torch.distributed (Gloo on CPUs, NCCL with CUDA), whose "
        "sockets need a trusted network.",
    )
    min_piece_size: Annotated[ByteSize, Field(gt=0)] = Field(
        ByteSize(256 << 10),
        description="Layers' KV leaves while later ones are computed, in pieces of at least so much: 256KiB, or bytes.",
    )
    request_timeout: float = Field(600.0, gt=0, le=86400, description="Seconds that one request may take.")
    queue_timeout: float | None = Field(
        None,
        gt=0,
        le=86400,
        description="Seconds that a request may wait for its turn before it gets 429. Default: its own timeout.",
    )
    transfer_timeout: float = Field(
        120.0, gt=0, le=86400, description="Seconds that one prefill and transfer may take."
    )
    token_timeout: float = Field(
        120.0, gt=0, le=86400, description="Seconds that one request may go without a token or a part of its prompt."
    )
    step_timeout: float = Field(
        120.0, gt=0, le=86400, description="Seconds after which an engine's step counts as one that never ends."
    )
    cluster_token_file: Path | None = Field(
        None,
        description="File of the secret by which replicas and front ends know each other, on each of their machines. "
        "Default: a new one with every start.",
    )
    cluster_token: SecretStr | None = Field(None, description="The same secret itself.")
    drain_seconds: float = Field(
        30.0, ge=0, le=86400, description="Seconds that a replica which is to end has to finish what it was asked for."
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        description="OpenTelemetry collector that is sent a trace of every request, by OTLP over HTTP: "
        "http://collector:4318. Default: no traces.",
    )
    revision: str = Field(
        "", description="Any text. A Serve config with another one restarts every replica, one after the other."
    )
    ray_address: str | None = Field(
        None, description="Ray cluster to join (auto: the one on this machine). Default: start one and stop it again."
    )

    @classmethod
    def settings_customise_sources(  # noqa: D102 (pydantic's interface)
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings

    @field_validator("port", mode="before")
    @classmethod
    def _not_a_service_link(cls, port: object) -> object:
        # Kubernetes sets CROSSKV_PORT=tcp://… in every pod beside a Service that is called crosskv.
        if isinstance(port, str) and "://" in port:
            raise ValueError("is an address; set enableServiceLinks: false on the pod or rename the Service")
        return port

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _traces_url(cls, endpoint: str | None) -> str | None:
        """Return where exactly to send: a collector's address alone means its usual path."""
        if endpoint is None:
            return None
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError("must be a URL of http or https; traces are sent by OTLP over HTTP, usually to port 4318")
        return endpoint if url.path not in ("", "/") else url._replace(path="/v1/traces").geturl()

    @field_validator("cluster_token")
    @classmethod
    def _usable_token(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None:
            ClusterToken(token.get_secret_value())
        return token

    @field_validator("api_key_file", "tls_certificate", "tls_key", "cluster_token_file")
    @classmethod
    def _absolute(cls, file: Path | None) -> Path | None:
        """Processes that read it later have other working directories."""
        return None if file is None else file.expanduser().absolute()

    @field_validator("kv_sharing")
    @classmethod
    def _sharing_rule(cls, rule: str) -> str:
        """Return the rule, a file replaced by its content, because replicas may run on other machines.

        Whether the model can honour it is checked against the model, by the worker's own rules.
        """
        if rule in ("model", "none") or re.fullmatch(r"every:0*([2-9]|[1-9]\d{1,5})|after:\d{1,6}", rule):
            return rule
        text = rule
        if not rule.lstrip().startswith("{"):
            path = Path(rule).expanduser()
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except OSError:
                raise ValueError(
                    "must be model, none, every:N with N of 2 or more, after:N, or a JSON file that can be read"
                ) from None
        try:
            targets = TypeAdapter(dict[str, str]).validate_json(text)
        except ValidationError:
            raise ValueError("the file must hold one JSON object that maps layer names to target names") from None
        return json.dumps(targets)

    @classmethod
    def load(cls, config_file: Path | None = None, **flags: object) -> Self:
        """Build the configuration from flags, the environment and a YAML file, in this order of precedence.

        A flag whose value is None was not given. Raises ``ConfigError``, which names for each bad value its origin.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        from_file = {} if config_file is None else cls._read_yaml(config_file)
        from_environment = EnvSettingsSource(cls)()
        try:
            return cls(**(from_file | from_environment | given))
        except ValidationError as error:
            lines = []
            for problem in error.errors():
                name = str(problem["loc"][0])
                flag = flag_of(name)
                if problem["type"] == "missing":
                    lines.append(f"{flag} is missing (or {ENVIRONMENT_PREFIX}{name.upper()}, or {name} in --config)")
                    continue
                if name in given:
                    origin = flag
                elif name in from_environment:
                    origin = f"{ENVIRONMENT_PREFIX}{name.upper()}"
                else:
                    origin = f"{name} in {config_file}"
                reason = problem["msg"].removeprefix("Value error, ")
                value = "(not shown)" if name in SECRETS else repr(problem["input"])
                lines.append(f"{origin} = {value}: {reason[:1].lower()}{reason[1:]}")
            raise ConfigError("; ".join(lines)) from None

    @classmethod
    def _read_yaml(cls, path: Path) -> dict[str, Any]:
        try:
            content = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ConfigError(f"--config {path}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
        if content is None:
            return {}
        if not isinstance(content, dict):
            raise ConfigError(f"--config {path}: must map field names to values, but holds a {type(content).__name__}")
        for key in content:
            if key not in cls.model_fields:
                nearest = difflib.get_close_matches(str(key), cls.model_fields, n=1, cutoff=0.0)
                raise ConfigError(f"--config {path}: unknown key {key!r}; the nearest valid one is {nearest[0]!r}")
        return {key: value for key, value in content.items() if value is not None}

    def replace(self, **changes: object) -> Self:
        """Return a copy with some fields changed and everything validated again."""
        return type(self)(**(self.model_dump() | changes))

    def unguarded(self) -> Self:
        """Return a copy for a cluster that a command starts for itself and asks by itself: without API keys and TLS."""
        return self.replace(api_key=None, api_key_file=None, tls_certificate=None, tls_key=None)

    def engine_config(self, role: Role, model_path: str) -> EngineConfig:
        """Return what one engine of this cluster is told. ``model_path`` is where the model's files lie."""
        return EngineConfig(
            model=model_path,
            role=role,
            dtype=self.dtype,
            device=self.device,
            decode_graphs=self.decode_graphs,
            kv_sharing=self.kv_sharing,
            block_size=self.block_size,
            kv_cache_memory=int(self.kv_cache_memory),
            max_model_len=self.max_model_len,
            max_batched_tokens=self.max_batched_tokens,
            max_running_requests=self.max_running_requests,
            max_waiting_requests=self.max_waiting_requests,
            prefix_caching=self.prefix_caching,
            state_checkpoint_blocks=self.state_checkpoint_blocks,
            local_prefill_threshold=self.local_prefill_threshold,
            max_prefill_streams=self.max_prefill_streams,
            transport=self.transport,
            min_piece_bytes=int(self.min_piece_size),
            request_timeout=self.request_timeout,
            queue_timeout=self.queue_timeout,
            transfer_timeout=self.transfer_timeout,
            drain_seconds=self.drain_seconds,
            token_timeout=self.token_timeout,
            step_timeout=self.step_timeout,
            threads=self.threads,
            bind_cores=self.bind_cores,
            advertised_host=self.advertised_host,
            tensor_parallel_size=self.ranks_of(role),
            cluster_token_file=self.cluster_token_file,
        )

    @property
    def rank_threads(self) -> int:
        """CPU threads of one rank: as configured, or an equal share of the cores that this process may use."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.ranks)

    def ranks_of(self, role: Role) -> int:
        """Return how many ranks a replica of a role has."""
        if role is Role.PREFILL and self.prefill_tensor_parallel_size is not None:
            return self.prefill_tensor_parallel_size
        return self.tensor_parallel_size

    @property
    def token(self) -> ClusterToken | None:
        """What replicas and front ends know each other by: as configured, or new; None if it is in a file."""
        if self.cluster_token_file is not None:
            if self.cluster_token is not None:
                raise ConfigError("--cluster-token-file and CROSSKV_CLUSTER_TOKEN are both given; give one of them")
            return None
        return ClusterToken.new() if self.cluster_token is None else ClusterToken(self.cluster_token.get_secret_value())

    @property
    def has_api_keys(self) -> bool:
        """Whether the API wants a key."""
        return self.api_key is not None or self.api_key_file is not None

    @property
    def tls(self) -> TlsFiles | None:
        """What the API's connections are encrypted with, if they are. Raises ``ConfigError`` for half of it."""
        if self.tls_certificate is None and self.tls_key is None:
            return None
        if self.tls_certificate is None or self.tls_key is None:
            raise ConfigError("--tls-certificate and --tls-key need each other; only one of them is given")
        return TlsFiles(self.tls_certificate, self.tls_key)

    @property
    def replicas(self) -> dict[Role, int]:
        """How many replicas of which roles there are."""
        if self.mode is Mode.COLOCATED:
            return {Role.COLOCATED: self.decode_replicas}
        return {Role.PREFILL: self.prefill_replicas, Role.DECODE: self.decode_replicas}

    @property
    def most_replicas(self) -> dict[Role, int]:
        """The same when every role is scaled up as far as it may be. Raises ``ConfigError`` for less than at first."""
        most = {}
        for role, count in self.replicas.items():
            name = "prefill" if role is Role.PREFILL else "decode"
            limit = self.max_prefill_replicas if role is Role.PREFILL else self.max_decode_replicas
            if limit is not None and limit < count:
                raise ConfigError(f"--max-{name}-replicas is {limit}, less than --{name}-replicas, which is {count}")
            most[role] = limit or count
        return most

    @property
    def ranks(self) -> int:
        """How many ranks all replicas have, scaled up as far as they may be."""
        return sum(count * self.ranks_of(role) for role, count in self.most_replicas.items())


def flag_of(field: str) -> str:
    """Return the command line's name for a field."""
    return "--" + field.replace("_", "-")
