"""A caller of the reference's worker finds every method, by name, by parameters, awaitable or not."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from refit_trainer.generation_worker import GenerationWorker

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference-interface.md"
CONSTRUCTOR = ["config", "bundle_indices", "fraction_of_gpus", "seed", "extra_env_vars", "defer_model_load"]
SYNCHRONOUS: dict[str, list[str]] = {
    "load_model": [],
    "get_vllm_logger_metrics": [],
    "clear_vllm_logger_metrics": [],
}
COROUTINES: dict[str, list[str]] = {
    "post_init_async": [],
    "get_reserved_url": [],
    "report_dp_openai_server_base_url": [],
    "init_collective_async": ["rank_prefix", "ip", "port", "world_size", "train_world_size"],
    "report_device_id_async": [],
    "prepare_refit_info_async": ["state_dict_info"],
    "update_weights_via_ipc_zmq_async": [],
    "update_weights_from_collective_async": [],
    "reset_prefix_cache_async": [],
    "sleep_async": [],
    "wake_up_async": [],
    "shutdown": [],
}
GENERATORS: dict[str, list[str]] = {"generate_async": ["data", "greedy"], "generate_text_async": ["data", "greedy"]}


def positional(method: object) -> list[str]:
    """Further ones of ours must be optional."""
    return [name for name in inspect.signature(method).parameters if name != "self"]  # type: ignore[arg-type]


def test_the_constructor_takes_the_references_arguments() -> None:
    assert positional(GenerationWorker.__init__) == CONSTRUCTOR


@pytest.mark.parametrize(("name", "parameters"), {**SYNCHRONOUS, **COROUTINES, **GENERATORS}.items())
def test_every_method_is_there(name: str, parameters: list[str]) -> None:
    method = getattr(GenerationWorker, name)
    assert inspect.iscoroutinefunction(method) is (name in COROUTINES)
    assert inspect.isasyncgenfunction(method) is (name in GENERATORS)
    assert positional(method)[: len(parameters)] == parameters
    more = list(inspect.signature(method).parameters.values())[1 + len(parameters) :]
    assert all(parameter.default is not inspect.Parameter.empty for parameter in more)


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *COROUTINES, *GENERATORS])
def test_the_document_says_how_each_method_is_called(name: str) -> None:
    """Whether to await it is what a caller of Ray's handles does not know."""
    how = "plain" if name in SYNCHRONOUS else "`await`" if name in COROUTINES else "`async for`"
    (row,) = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `") and f"`{name}(" in line]
    assert row.split(" | ")[1] == how
