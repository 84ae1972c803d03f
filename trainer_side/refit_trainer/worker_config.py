"""NeMo-RL's generation configuration, as what a daemon is started with and as what a request asks for. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refit_protocol.messages import Sampling

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


# The reference has no bound: long enough for any rollout, and yet an end for one that nobody waits for any more.
GENERATION_SECONDS = 7 * 86400.0


@dataclass(frozen=True)
class WorkerConfig:
    """Reads the mapping that the reference's worker is constructed with; keys that mean nothing here are ignored.

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
