"""Every setting of the daemon, its default and its meaning, read once from flags, environment and TOML, in this
order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from refit_protocol.endpoint import default_directory, default_endpoint, socket_path
from refit_protocol.messages import AttestMode, InflightPolicy, PlanMode

ENVIRONMENT_PREFIX = "REFITD_"


class ConfigError(Exception):
    """A setting that cannot be used; one line that says which and what to do."""


class Section(BaseModel):
    """A table of the configuration file: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineConfig(Section):
    """What vLLM is started with. `extra` holds further vLLM engine arguments by their own names.

    An engine that does not answer for `liveness_timeout_seconds` is dead unless its processes work; one that works and
    does not answer for `liveness_busy_seconds` is dead, too.
    """

    dtype: str = "auto"
    load_format: str = "auto"
    tokenizer: bool = True
    served_model_name: str | None = None
    seed: int = 0
    max_model_len: int | None = Field(default=None, gt=0)
    max_num_seqs: int | None = Field(default=None, gt=0)
    tensor_parallel_size: int = Field(default=1, gt=0)
    pipeline_parallel_size: int = Field(default=1, gt=0)
    data_parallel_size: int = Field(default=1, gt=0)
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    enable_sleep_mode: bool = False
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    max_logprobs: int = Field(default=20, ge=0)
    scheduling_policy: Literal["priority", "fcfs"] = "priority"
    cpu_kv_cache_gib: int = Field(default=4, gt=0)
    liveness_interval_seconds: float = Field(default=2.0, gt=0)
    liveness_timeout_seconds: float = Field(default=20.0, gt=0)
    liveness_busy_seconds: float = Field(default=300.0, gt=0)
    extra: dict[str, Any] = {}


class ServerConfig(Section):
    """The socket and what clients may do with it. `socket_group` lets one more group in, with mode 0660.

    A tcp endpoint needs `curve_secret_key`, the daemon's own, and `curve_clients`, a directory with the public keys of
    those who may connect.
    """

    socket_mode: int = Field(default=0o600, ge=0, le=0o770)
    socket_group: str | None = None
    curve_secret_key: Path | None = None
    curve_clients: Path | None = None
    lease_seconds: float = Field(default=60.0, gt=0)
    watched_lease_seconds: float = Field(default=180.0, gt=0)
    min_lease_seconds: float = Field(default=0.2, gt=0)
    max_lease_seconds: float = Field(default=600.0, gt=0)
    max_sessions: int = Field(default=2000, gt=0)
    max_requests_per_session: int = Field(default=4096, gt=0)
    max_prompts_per_request: int = Field(default=4096, gt=0)
    max_message_bytes: int = Field(default=64 << 20, gt=0)
    max_header_bytes: int = Field(default=16 << 20, gt=0)
    max_bucket_pieces: int = Field(default=1 << 16, gt=0)
    max_open_segments: int = Field(default=1 << 12, gt=0)
    max_buffered_bytes: int = Field(default=256 << 20, gt=0)
    max_backlog_replies: int = Field(default=1 << 14, gt=0)
    max_backlog_bytes: int = Field(default=256 << 20, gt=0)


class RefitConfig(Section):
    """Defaults of refits; a request may choose its own policy, attest and finite check.

    `checkpoint_roots`: what ReloadWeights may read besides the model's own directory; None: anything for local clients,
    nothing for those over tcp.
    `hold_seconds`: how long a prepared refit may keep the engine waiting for its trainer.
    `max_broadcast_bytes` bounds the two staging buffers that each worker holds for a collective source.
    """

    plan: PlanMode = "auto"
    policy: InflightPolicy = "keep"
    attest: AttestMode = "sampled"
    check_finite: bool = False
    keep_last: Literal["host", "none"] = "none"
    gate_wait_seconds: float = Field(default=60.0, gt=0)
    deadline_seconds: float = Field(default=300.0, gt=0)
    hold_seconds: float = Field(default=10.0, gt=0)
    max_waiting_requests: int = Field(default=4096, ge=0)
    checkpoint_roots: list[Path] | None = None
    max_broadcast_bytes: int = Field(default=1 << 30, gt=0)


class LoraConfig(Section):
    """LoRA adapters that requests may name. `adapters`: those loaded from the start, by name."""

    enabled: bool = False
    max_adapters: int = Field(default=4, gt=0)
    max_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = 16
    adapters: dict[str, Path] = {}


class GenerationConfig(Section):
    """Limits of generation. `deadline_seconds` bounds requests that name none."""

    max_running_requests: int = Field(default=16384, gt=0)
    deadline_seconds: float | None = Field(default=None, gt=0)


class HttpConfig(Section):
    """The OpenAI endpoint. Port 0 takes a free one.

    `max_total_body_bytes` bounds the bodies of all requests together, each until it is answered.
    """

    enabled: bool = False
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    api_key: str | None = None
    max_body_bytes: int = Field(default=32 << 20, gt=0)
    max_total_body_bytes: int = Field(default=2 << 30, gt=0)
    max_connections: int = Field(default=10_000, gt=0)
    strict_prefix: bool = True
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template: Path | None = None

    @model_validator(mode="after")
    def _one_body_fits(self) -> Self:
        if self.max_total_body_bytes < self.max_body_bytes:
            raise ValueError("max_total_body_bytes must not be less than max_body_bytes")
        return self


class ShutdownConfig(Section):
    """What SIGTERM does with running requests, and how long they get."""

    policy: Literal["finish", "abort"] = "finish"
    drain_seconds: float = Field(default=30.0, ge=0)


class LogConfig(Section):
    """`json_lines` None: JSON under systemd, readable in a terminal."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    json_lines: bool | None = None
    vllm_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"


class MetricsConfig(Section):
    """The sampled engine figures that a trainer can get and clear."""

    sample_interval_seconds: float = Field(default=0.5, gt=0)
    max_samples: int = Field(default=100_000, gt=0)


class Config(BaseSettings):
    """The whole configuration. `model` is a directory or a name vLLM can load."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter="__"
    )

    model: str
    endpoint: str = Field(default_factory=lambda: default_endpoint(os.environ, os.getuid()))
    runtime_directory: Path = Field(default_factory=lambda: default_directory(os.environ, os.getuid()))
    defer_load: bool = False
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    refit: RefitConfig = RefitConfig()
    generation: GenerationConfig = GenerationConfig()
    lora: LoraConfig = LoraConfig()
    http: HttpConfig = HttpConfig()
    shutdown: ShutdownConfig = ShutdownConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def served_model_name(self) -> str:
        """The configured one; of a directory its last part, of a model on a hub its whole name."""
        if self.engine.served_model_name is not None:
            return self.engine.served_model_name
        directory = Path(self.model).expanduser()
        return directory.absolute().name if directory.is_dir() else self.model

    @model_validator(mode="after")
    def _http_needs_a_tokenizer(self) -> Config:
        if self.http.enabled and not self.engine.tokenizer:
            raise ValueError("http.enabled needs engine.tokenizer")
        return self

    @model_validator(mode="after")
    def _adapters_need_lora(self) -> Self:
        if self.lora.adapters and not self.lora.enabled:
            raise ValueError("lora.adapters needs lora.enabled")
        if len(self.lora.adapters) > self.lora.max_adapters:
            raise ValueError(f"lora.adapters names {len(self.lora.adapters)}, lora.max_adapters allows fewer")
        return self

    @model_validator(mode="after")
    def _endpoint_can_be_bound(self) -> Self:
        over_tcp = self.endpoint.startswith("tcp://")
        if socket_path(self.endpoint) is None and not over_tcp:
            raise ValueError(f"endpoint {self.endpoint!r}: only ipc:// and, with CURVE keys, tcp:// are served")
        if over_tcp and (self.server.curve_secret_key is None or self.server.curve_clients is None):
            raise ValueError(
                f"endpoint {self.endpoint!r}: tcp:// needs server.curve_secret_key and server.curve_clients "
                "(refitd keygen makes keys)"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the names are pydantic's
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then environment, then the file."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


# What a reload may change; everything else needs a restart.
RELOADABLE = ("log", "shutdown")


def fixed_changes(before: Config, after: Config) -> list[str]:
    """The settings that differ but cannot change while the daemon runs."""
    return [
        name for name in Config.model_fields if name not in RELOADABLE and getattr(before, name) != getattr(after, name)
    ]


def load_config(flags: Mapping[str, Any], file: Path | None) -> Config:
    """Raises `ConfigError` with one line; `flags`, nested like the file, win over environment and file."""
    if file is not None and not file.is_file():
        raise ConfigError(f"configuration file {file} does not exist")
    source = type("ConfigFromFile", (Config,), {"model_config": SettingsConfigDict(toml_file=file)})
    _refuse_unknown_variables(os.environ)
    try:
        config: Config = source(**flags)
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from None
    except (SettingsError, ValueError) as error:
        raise ConfigError(f"{file or 'environment'}: {error}") from None
    return config


def _refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    for name in environment:
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        section, _, _key = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        if section not in Config.model_fields:
            known = ", ".join(Config.model_fields)
            raise ConfigError(f"environment variable {name}: unknown setting {section!r}, known are: {known}")


def _one_line(error: ValidationError) -> str:
    # A misspelt setting often leaves another one missing: the misspelling is what must be said.
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown setting {where!r}: remove it or correct its name (docs/configuration.md lists all)"
    if first["type"] == "missing":
        variable = f"{ENVIRONMENT_PREFIX}{where.upper().replace('.', '__')}"
        return f"setting {where!r} is missing: give it with --{where}, as {variable} or in the file of --config"
    reason = first["msg"].removeprefix("Value error, ")
    return f"setting {where!r}: {reason}" if where else reason
