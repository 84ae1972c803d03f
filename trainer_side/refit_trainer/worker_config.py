"""NeMo-RL's generation configuration, as what a daemon is started with and as what a request asks for. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refit_protocol.messages import ModelInfo, Sampling
from refit_trainer.errors import SettingsMismatch

# The daemon's settings by the reference's names in `vllm_cfg`.
_SETTINGS = {
    "precision": "engine.dtype",
    "max_model_len": "engine.max_model_len",
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "pipeline_parallel_size": "engine.pipeline_parallel_size",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "enforce_eager": "engine.enforce_eager",
    "load_format": "engine.load_format",
    "expose_http_server": "http.enabled",
    "vllm_metrics_logger_interval": "metrics.sample_interval_seconds",
}

# Besides those: what becomes of a request or is turned round.
_OTHER_VLLM_KEYS = frozenset({"skip_tokenizer_init", "ignore_eos"})
_KEYS = frozenset(
    {
        "model_name",
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stop_strings",
        "stop_token_ids",
        "_pad_token_id",
        "vllm_cfg",
        "vllm_kwargs",
        "endpoint",
        "refitd",
        "generation_seconds",
    }
)
# How the reference places and drives its workers: nothing here could be told so.
_OF_THE_FRAMEWORK = frozenset({"backend", "colocated", "async_engine"})
_CHECKED = frozenset({"max_model_len"})
_OF_REQUESTS = frozenset({"enable_return_routed_experts"})

# The reference has no bound: long enough for any rollout, and yet an end for one that nobody waits for any more.
GENERATION_SECONDS = 7 * 86400.0


@dataclass(frozen=True)
class WorkerConfig:
    """Reads the mapping that the reference's worker is constructed with; `ignored` names what means nothing here.

    Three keys are refitd's own: `endpoint` names a running daemon (None starts one), `refitd` holds further settings of
    a daemon that is started, by their own names, and `generation_seconds` bounds each batch, by default to a week.
    """

    given: Mapping[str, Any]
    seed: int | None = None

    @property
    def endpoint(self) -> str | None:
        endpoint: str | None = self.given.get("endpoint")
        return endpoint

    @property
    def pad_token_id(self) -> int:
        return int(self.given.get("_pad_token_id") or 0)

    @property
    def checks_padding(self) -> bool:
        return self.given.get("_pad_token_id") is not None

    @property
    def generation_seconds(self) -> float:
        return float(self.given.get("generation_seconds") or GENERATION_SECONDS)

    @property
    def routed_experts(self) -> bool:
        return bool(self._vllm_arguments.get("enable_return_routed_experts"))

    @property
    def stop_strings(self) -> list[str]:
        return list(self.given.get("stop_strings") or [])

    @property
    def ignored(self) -> list[str]:
        """The keys that change nothing: unknown ones, and what only a daemon of our own could be started with."""
        unknown = [name for name in self.given if name not in _KEYS | _OF_THE_FRAMEWORK]
        unknown += [
            f"vllm_cfg.{name}"
            for name, value in self._vllm.items()
            if name not in _SETTINGS.keys() | _OTHER_VLLM_KEYS | _OF_THE_FRAMEWORK and value is not None
        ]
        return unknown if self.endpoint is None else unknown + self._settings_of_a_daemon()

    def _settings_of_a_daemon(self) -> list[str]:
        settings = _SETTINGS.keys() - _CHECKED | {"skip_tokenizer_init"}
        names = [f"vllm_cfg.{name}" for name, value in self._vllm.items() if name in settings and value is not None]
        names += [f"vllm_kwargs.{name}" for name in self._vllm_arguments if name not in _OF_REQUESTS]
        return names + [f"refitd.{name}" for name in self.given.get("refitd") or {}]

    def check(self, model: ModelInfo) -> None:
        """Raises `SettingsMismatch` where the daemon that was named serves another model, or another length of it."""
        asked, length = self.given.get("model_name"), self._vllm.get("max_model_len")
        if asked is not None and not _is_named(str(asked), model):
            raise SettingsMismatch(
                f"the daemon serves {model.path or model.name}, the configuration's model_name is {asked}: name that "
                "model, or leave model_name out",
                details={"model_name": {"asked": str(asked), "served": model.path or model.name}},
            )
        if length is not None and int(length) != model.max_model_len:
            raise SettingsMismatch(
                f"the daemon serves a max_model_len of {model.max_model_len}, the configuration asks for {length}: "
                "start the daemon with that, or leave max_model_len out",
                details={"max_model_len": {"asked": int(length), "served": model.max_model_len}},
            )

    def daemon_settings(self) -> dict[str, Any]:
        """For a daemon of our own. The load is always put off, so that it can be asked for and waited for."""
        if "model_name" not in self.given:
            raise ValueError("config needs model_name to start a daemon, or endpoint to connect to one")
        return {"model": self.given["model_name"], "defer_load": True, **dict(self._engine_settings())}

    def sampling(self, stop: Sequence[str], *, greedy: bool, text: bool) -> Sampling:
        return Sampling(
            max_tokens=self.given.get("max_new_tokens"),
            temperature=0.0 if greedy else float(self.given.get("temperature", 1.0)),
            top_p=float(self.given.get("top_p", 1.0)),
            top_k=1 if greedy else int(self.given.get("top_k") or 0),
            stop=list(stop),
            stop_token_ids=list(self.given.get("stop_token_ids") or []),
            include_stop_str_in_output=True,
            ignore_eos=bool(self._vllm.get("ignore_eos", False)),
            text=text,
        )

    @property
    def _vllm(self) -> Mapping[str, Any]:
        section: Mapping[str, Any] = self.given.get("vllm_cfg") or {}
        return section

    @property
    def _vllm_arguments(self) -> Mapping[str, Any]:
        arguments: Mapping[str, Any] = self.given.get("vllm_kwargs") or {}
        return arguments

    def _engine_settings(self) -> Iterator[tuple[str, Any]]:
        for name, setting in _SETTINGS.items():
            if self._vllm.get(name) is not None:
                yield setting, self._vllm[name]
        yield "engine.tokenizer", not self._vllm.get("skip_tokenizer_init", False)
        if self.seed is not None:
            yield "engine.seed", self.seed
        for name, value in self._vllm_arguments.items():
            yield f"engine.extra.{name}", value
        yield from (self.given.get("refitd") or {}).items()


def _is_named(asked: str, model: ModelInfo) -> bool:
    """By its name, its directory, or, where only one of both is a directory, by the last part of it."""
    served = model.path or model.name
    if asked in (model.name, served):
        return True
    if os.path.isabs(asked) and os.path.isabs(served):
        return os.path.realpath(asked) == os.path.realpath(served)
    return os.path.basename(asked.rstrip("/")) == os.path.basename(served.rstrip("/"))
