"""Real vLLM workers in the test's own process, without the engine core around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor.uniproc_executor import UniProcExecutor

EXTENSION = "refitd.worker.extension.RefitWorkerExtension"


def engine_config(checkpoint: Path, **engine_args: Any) -> VllmConfig:
    """The smallest engine for a test model, with the refit calls in its workers."""
    defaults = {"dtype": "bfloat16", "max_model_len": 128, "enforce_eager": True, "skip_tokenizer_init": True}
    args = EngineArgs(model=str(checkpoint), worker_extension_cls=EXTENSION, **{**defaults, **engine_args})
    return args.create_engine_config()


class LoadedWorker:
    """A CPU worker that has loaded a checkpoint, called as the daemon calls it."""

    def __init__(self, checkpoint: Path, **engine_args: Any) -> None:
        self._executor = UniProcExecutor(engine_config(checkpoint, **engine_args))

    def call(self, method: str, *args: Any) -> dict[str, Any]:
        """Of an answer that must not be an error."""
        answer = self.answer(method, *args)
        assert answer.get("ok"), answer
        return answer

    def refused(self, method: str, *args: Any) -> tuple[str, dict[str, Any], bool]:
        """(code, details, wrote) of an answer that must be an error."""
        answer = self.answer(method, *args)
        assert "error" in answer, answer
        return answer["error"]["code"], answer["error"]["details"], answer["wrote"]

    def answer(self, method: str, *args: Any) -> dict[str, Any]:
        answers: list[dict[str, Any]] = self._executor.collective_rpc(method, args=args)
        return answers[0]

    @property
    def worker(self) -> Any:
        return self._executor.driver_worker.worker

    @property
    def model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.worker.model_runner.get_model()
        return model

    def served(self) -> dict[str, torch.Tensor]:
        """A copy of everything the kernels read: parameters, and expert weights packed for the CPU."""
        held = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        for name, module in self.model.named_modules():
            experts = getattr(getattr(getattr(module, "quant_method", None), "moe_kernel", None), "fused_experts", None)
            for leaf, packed in getattr(experts, "refitd_packed", {}).items():
                held[f"{name}.packed.{leaf}"] = packed.clone()
        return held

    def close(self) -> None:
        self.call("refitd_close_all")
        self._executor.shutdown()


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names whose values are not bit for bit the same."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name].view(torch.int16), other[name].view(torch.int16))]
