"""What of the reference's configuration is heeded, what is ignored and said, what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refit_protocol.messages import LoadModel, ModelLoaded
from refit_trainer import SettingsMismatch
from refit_trainer.generation_worker import GenerationWorker
from refit_trainer.worker_config import WorkerConfig
from tests.trainer.peer import MODEL, STATUS, Asked, Peer, endpoint_in, running

SERVED = msgspec.structs.replace(MODEL, name="qwen3-8b", path="/srv/models/qwen3-8b", max_model_len=256)
TYPICAL = {
    "backend": "vllm",
    "colocated": {"enabled": True},
    "model_name": "qwen3-8b",
    "max_new_tokens": 8,
    "top_k": None,
    "_pad_token_id": 0,
    "vllm_cfg": {"async_engine": True, "precision": "bfloat16", "skip_tokenizer_init": False, "ignore_eos": True},
    "vllm_kwargs": {"max_num_seqs": 8, "enable_return_routed_experts": False},
}


@pytest.mark.parametrize(
    ("more", "ignored"),
    [
        ({}, []),
        ({"max_new_token": 8}, ["max_new_token"]),
        (
            {"vllm_cfg": {"kv_cache_dtype": "fp8", "load_fromat": "auto"}},
            ["vllm_cfg.kv_cache_dtype", "vllm_cfg.load_fromat"],
        ),
        ({"vllm_cfg": {"kv_cache_dtype": None}}, []),
        ({"endpoint": "ipc:///x"}, ["vllm_cfg.precision", "vllm_cfg.skip_tokenizer_init", "vllm_kwargs.max_num_seqs"]),
    ],
)
def test_what_changes_nothing_is_named(more: dict[str, Any], ignored: list[str]) -> None:
    """Typos, settings that have no counterpart, and those of a daemon that runs already; not what was left unset."""
    assert WorkerConfig({**TYPICAL, **more}).ignored == ignored


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    """A daemon that serves `SERVED`."""

    def answer(asked: Asked) -> None:
        loading = isinstance(asked.body, LoadModel)
        asked.reply(ModelLoaded(model=SERVED, load_seconds=0.0) if loading else STATUS)

    with running(Peer(endpoint_in(tmp_path), answer=answer)) as started:
        yield started


def begin(peer: Peer, config: dict[str, Any]) -> None:
    worker = GenerationWorker({"endpoint": peer.endpoint, **config})
    worker._end()


def test_each_ignored_setting_is_warned_of_by_name(peer: Peer) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        begin(peer, {"max_new_token": 8, "vllm_cfg": {"kv_cache_dtype": "fp8"}})
    assert [str(warning.message).split()[4] for warning in seen] == ["max_new_token", "vllm_cfg.kv_cache_dtype"]
    assert {warning.filename for warning in seen} == {__file__}


@pytest.mark.parametrize("name", ["qwen3-8b", "/srv/models/qwen3-8b", "/srv/models/qwen3-8b/", "Qwen/qwen3-8b"])
def test_the_daemons_own_settings_are_taken(peer: Peer, name: str) -> None:
    begin(peer, {"model_name": name, "vllm_cfg": {"max_model_len": 256}})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_name": "qwen3-4b"}, "model_name"),
        ({"model_name": "/srv/other/qwen3-8b"}, "model_name"),
        ({"vllm_cfg": {"max_model_len": 512}}, "max_model_len"),
    ],
)
def test_other_settings_than_the_daemons_are_refused(peer: Peer, config: dict[str, Any], named: str) -> None:
    """They would be ignored: rollouts of another model, or of another length, without a word."""
    with pytest.raises(SettingsMismatch, match=named) as refused:
        begin(peer, config)
    assert [*refused.value.details] == [named]
