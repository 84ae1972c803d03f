"""What the configuration turns into for vLLM, and what its refusals turn into for the operator."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from refitd.compat import engine_argument_names
from refitd.config import load_config
from refitd.engine_start import WORKER_EXTENSION, engine_arguments, engine_environment, refusal_of


def test_every_engine_argument_exists_in_this_vllm() -> None:
    """What the configuration turns into is known to the installed release."""
    arguments = engine_arguments(load_config({"model": "m"}, None))
    assert set(arguments) <= engine_argument_names()
    assert arguments["worker_extension_cls"] == WORKER_EXTENSION


@pytest.mark.parametrize(("size", "multiprocessing"), [(1, "0"), (2, "1")])
def test_one_worker_lives_inside_the_engine_process(size: int, multiprocessing: str) -> None:
    """Several need a process each."""
    config = load_config({"model": "m", "engine": {"tensor_parallel_size": size}}, None)
    assert engine_environment(config)["VLLM_ENABLE_V1_MULTIPROCESSING"] == multiprocessing


class Refusing(BaseModel):
    max_model_len: int

    @field_validator("max_model_len")
    @classmethod
    def _refuse(cls, value: int) -> int:
        raise ValueError(f"{value} is more\nthan the model takes")


def test_what_vllms_configuration_refuses_is_one_line() -> None:
    """Of pydantic's many, the field where there is one, and the reason."""
    with pytest.raises(ValidationError) as refused:
        Refusing(max_model_len=100_000)
    assert refusal_of(refused.value) == "max_model_len: 100000 is more than the model takes"
