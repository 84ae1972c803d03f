"""LoRA adapters inside of a worker: by vLLM's own manager, and the checks that it leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import TensorShape
from refitd.worker.checkpoint import Checkpoint
from refitd.worker.weights import Expected

PREFIX = "base_model.model."


def load_adapter(
    model_runner: Any, expected: Mapping[str, Expected], name: str, number: int, directory: str
) -> list[str]:
    """The modules it has weights for that are not here, which vLLM would leave out without a word.

    Raises `invalid_adapter`, with nothing left of it.
    """
    from vllm.lora.request import LoRARequest

    try:
        with Checkpoint(Path(directory)) as files:
            check_shapes(files.tensors, expected)
        check_finite(Path(directory))
        model_runner.add_lora(LoRARequest(name, number, directory))
    # Files of somebody else's making: vLLM and its readers raise whatever comes to them.
    except Exception as error:
        model_runner.remove_lora(number)
        reason = error.message if isinstance(error, ProtocolError) else str(error)
        raise ProtocolError(ErrorCode.INVALID_ADAPTER, f"adapter {name!r}: {reason}") from error
    manager = model_runner.lora_manager._adapter_manager
    return sorted(module for module in manager.get_adapter(number).loras if module not in manager.modules)


def check_finite(directory: Path) -> None:
    """Raises ValueError for NaN and infinity, which would lie in the KV cache for whoever gets the blocks next."""
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                if not tensors.get_tensor(name).float().isfinite().all():
                    raise ValueError(f"{name} is not finite")


def check_shapes(adapter: Mapping[str, TensorShape], expected: Mapping[str, Expected]) -> None:
    """Raises ValueError where two factors do not make a change of the weight they are for: vLLM would use the part that
    fits."""
    for name, up in adapter.items():
        module, is_up, _ = name.removeprefix(PREFIX).partition(".lora_B.weight")
        weight = expected.get(f"{module}.weight")
        down = adapter.get(name.replace(".lora_B.", ".lora_A."))
        if not is_up or weight is None:
            continue
        if down is None:
            raise ValueError(f"{name} has no lora_A beside it")
        if (*up.shape, *down.shape) != (weight.shape[0], up.shape[-1], up.shape[-1], weight.shape[-1]):
            raise ValueError(f"{module}: {list(up.shape)} times {list(down.shape)} is not {list(weight.shape)}")
