"""Options that cannot be: refused in the caller's words by every client, before the daemon is asked for anything."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest
import torch

from refit_protocol.messages import AttestMode, InflightPolicy, Sleep, SleepStateChanged, StructuredOutputs, WakeUp
from refit_trainer import AsyncDaemon, Daemon, Fleet, Sampling, share_parameters
from refit_trainer.aio import ConnectOptions
from refit_trainer.fleet.aio import FleetOptions, order_of
from refit_trainer.options import check_options
from refit_trainer.prompts import GenerateOptions, generate_command
from refit_trainer.refits import PrepareOptions, RefitOptions
from tests.trainer.peer import STATUS, Asked, Peer

Refused = tuple[type[Exception], str]

CONNECTING: list[tuple[dict[str, Any], Refused]] = [
    ({"lease_seconds": -1}, (ValueError, "lease_seconds is -1: it has to be a number above 0")),
    ({"lease_seconds": 0}, (ValueError, "lease_seconds is 0")),
    ({"lease_seconds": math.nan}, (ValueError, "lease_seconds is nan")),
    ({"lease_seconds": "60"}, (TypeError, "lease_seconds is '60'")),
    ({"patience_seconds": -0.1}, (ValueError, "patience_seconds is -0.1: it has to be a number from 0 on")),
    ({"bucket_bytes": 0}, (ValueError, "bucket_bytes is 0: it has to be a whole number from 1 on")),
    ({"timeout_seconds": -1}, (ValueError, "timeout_seconds is -1: it has to be a number above 0")),
    ({"timeout_seconds": "10"}, (TypeError, "timeout_seconds is '10'")),
    ({"patience": 5}, (TypeError, r"connect\(\) has no option 'patience'; it has .*endpoint.*timeout_seconds")),
]
REFITTING: list[tuple[dict[str, Any], Refused]] = [
    ({"policy": "wait"}, (ValueError, "policy is 'wait': it has to be 'abort', 'finish', 'keep', 'recompute' or None")),
    ({"policy": 3}, (TypeError, "policy is 3")),
    ({"attest": "yes"}, (ValueError, "attest is 'yes': it has to be 'full', 'off', 'sampled' or None")),
    ({"check_finite": "no"}, (TypeError, "check_finite is 'no': it has to be True or False or None")),
    ({"version": "4"}, (TypeError, "version is '4': it has to be a whole number from 0 on")),
    ({"version": 4.0}, (TypeError, "version is 4.0")),
    ({"version": -1}, (ValueError, "version is -1")),
    ({"deadline_seconds": 0}, (ValueError, "deadline_seconds is 0: it has to be a number above 0")),
    ({"deadline_seconds": math.inf}, (ValueError, "deadline_seconds is inf")),
]
PARTS: list[tuple[dict[str, Any], Refused]] = [
    ({"only": "weight"}, (TypeError, "only is 'weight': it has to be a non-empty list of text")),
    ({"only": ["weight", 1]}, (TypeError, "only is")),
    ({"only": []}, (ValueError, r"only is \[\]: it has to be a non-empty list of text or None")),
    ({"polcy": "keep"}, (TypeError, r"has no option 'polcy'; it has .*policy")),
]
GENERATING: list[tuple[dict[str, Any], Refused]] = [
    ({"deadline_seconds": math.nan}, (ValueError, "deadline_seconds is nan")),
    ({"min_version": "3"}, (TypeError, "min_version is '3'")),
    ({"incomplete": "drop"}, (ValueError, "incomplete is 'drop': it has to be 'raise' or 'yield'")),
    ({"wait_seconds": 3}, (TypeError, r"generate\(\) has no option 'wait_seconds'; it has deadline_seconds")),
    ({"max_tokens": 3}, (TypeError, r"no option 'max_tokens': it belongs into the sampling, Sampling\(max_tokens=...")),
]
SAMPLING: list[tuple[dict[str, Any], Refused]] = [
    ({"stop": "x"}, (TypeError, "stop is 'x': it has to be a list of text")),
    ({"max_tokens": "512"}, (TypeError, "max_tokens is '512': it has to be a whole number or None")),
    ({"temperature": math.nan}, (ValueError, "temperature is nan: it has to be a number")),
    ({"logit_bias": {3: 1.0}}, (TypeError, r"logit_bias is .*: it has to be a list of \(a whole number, a number\)")),
    ({"structured": "json"}, (TypeError, "structured is 'json': it has to be StructuredOutputs or None")),
    ({"structured": {"regex": "a", "backend": "x"}}, (ValueError, "structured is .*: it has to be StructuredOutputs")),
]
GROUPS: list[tuple[dict[str, Any], Refused]] = [
    ({"port": 70_000}, (ValueError, "port is 70000: it has to be a whole number from 0 to 65535")),
    ({"port": "80"}, (TypeError, "port is '80'")),
    ({"trainer_ranks": 0}, (ValueError, "trainer_ranks is 0: it has to be a whole number from 1 on")),
    ({"bucket_bytes": 0.5}, (TypeError, "bucket_bytes is 0.5")),
    ({"timeout_seconds": 0}, (ValueError, "timeout_seconds is 0: it has to be a number above 0")),
    ({"world_size": 2}, (TypeError, r"collective\(\) has no option 'world_size'; it has .*trainer_ranks")),
]
SERVICE: list[tuple[Callable[[Any], Any], Refused]] = [
    (lambda daemon: daemon.sleep(level=3), (ValueError, "level is 3: it has to be 1 or 2")),
    (lambda daemon: daemon.sleep(policy="wait"), (ValueError, "policy is 'wait'")),
    (lambda daemon: daemon.wake_up(["kv"]), (ValueError, "tags is .*'kv_cache' or 'weights'")),
    (lambda daemon: daemon.wake_up("weights"), (TypeError, "tags is 'weights': it has to be a list of")),
    (lambda daemon: daemon.digest(mode="x"), (ValueError, "mode is 'x': it has to be 'full' or 'sampled'")),
    (lambda daemon: daemon.logger_metrics(clear="yes"), (TypeError, "clear is 'yes': it has to be True or False")),
    (lambda daemon: daemon.load_adapter(3, "/tmp"), (TypeError, "name is 3: it has to be text")),
]


@pytest.fixture
def model() -> torch.nn.Module:
    return share_parameters(torch.nn.Linear(2, 2))


def refused_by_both(peer: Peer, use: Callable[[Any], Any], refused: Refused) -> None:
    """`use` is called with either client; nothing but greetings came to the daemon."""
    expected, said = refused

    async def begun(outcome: Any) -> None:
        await (outcome if inspect.isawaitable(outcome) else anext(outcome))

    async def use_async() -> None:
        async with AsyncDaemon.connect(peer.endpoint) as daemon:
            with pytest.raises(expected, match=said):
                await begun(use(daemon))

    with Daemon.connect(peer.endpoint) as daemon, pytest.raises(expected, match=said):
        use(daemon)
    asyncio.run(use_async())
    assert peer.asked.empty()


@pytest.mark.parametrize(("options", "refused"), CONNECTING)
def test_a_connection_that_cannot_be(options: dict[str, Any], refused: Refused, peer: Peer) -> None:
    for client in (Daemon, AsyncDaemon):
        with pytest.raises(refused[0], match=refused[1]):
            client.connect(peer.endpoint, **options)
    assert not peer.hellos


def test_an_endpoint_that_cannot_be(model: torch.nn.Module) -> None:
    """Least of all what `refit` takes."""
    for client in (Daemon, AsyncDaemon):
        with pytest.raises(TypeError, match=r"endpoint is Linear.*: it has to be text or None"):
            client.connect(model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"endpoints is .*: it has to be a list of text"):
        Fleet.connect([model])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="endpoints is one text: pass a list"):
        Fleet.connect("ipc:///run/refitd.sock")


@pytest.mark.parametrize(("options", "refused"), CONNECTING[:4] + CONNECTING[-3:])
def test_a_fleet_that_cannot_be(options: dict[str, Any], refused: Refused, peer: Peer) -> None:
    with pytest.raises(refused[0], match=refused[1]):
        Fleet.connect([peer.endpoint], **options)
    with pytest.raises(ValueError, match="on_failure is 'skip': it has to be 'leave_out' or 'restore'"):
        Fleet.connect([peer.endpoint], on_failure="skip")  # type: ignore[arg-type]
    assert not peer.hellos


@pytest.mark.parametrize(("options", "refused"), REFITTING + PARTS)
@pytest.mark.parametrize("call", ["refit", "prepare_refit"])
def test_a_refit_that_cannot_be(
    call: str, options: dict[str, Any], refused: Refused, peer: Peer, model: torch.nn.Module
) -> None:
    refused_by_both(peer, lambda daemon: getattr(daemon, call)(model, **options), refused)


@pytest.mark.parametrize(("options", "refused"), [*REFITTING, PARTS[-1], ({"only": ["w"]}, (TypeError, "no option"))])
def test_a_checkpoint_that_cannot_be_asked_for(options: dict[str, Any], refused: Refused, peer: Peer) -> None:
    refused_by_both(peer, lambda daemon: daemon.reload("/a", **options), refused)


@pytest.mark.parametrize(("options", "refused"), GENERATING)
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_generation_that_cannot_be(call: str, options: dict[str, Any], refused: Refused, peer: Peer) -> None:
    refused_by_both(peer, lambda daemon: getattr(daemon, call)([[1, 2]], **options), refused)


@pytest.mark.parametrize(("fields", "refused"), SAMPLING)
def test_a_sampling_that_cannot_be(fields: dict[str, Any], refused: Refused, peer: Peer) -> None:
    refused_by_both(peer, lambda daemon: daemon.generate([[1, 2]], Sampling(**fields)), refused)


@pytest.mark.parametrize(("use", "refused"), SERVICE)
def test_what_an_engine_cannot_do(use: Callable[[Any], Any], refused: Refused, peer: Peer) -> None:
    refused_by_both(peer, use, refused)


@pytest.mark.parametrize(("options", "refused"), GROUPS)
def test_a_group_that_cannot_be(options: dict[str, Any], refused: Refused, peer: Peer) -> None:
    refused_by_both(peer, lambda daemon: daemon.collective(**options), refused)


def test_what_a_fleet_cannot_do(peer: Peer, model: torch.nn.Module) -> None:
    """Not one of its daemons is asked for more than how it is, as when it is connected to."""
    asked = []

    def answer(coming: Asked) -> None:
        asked.append(coming.body)
        coming.reply(STATUS)

    peer.answer = answer
    with Fleet.connect([peer.endpoint]) as fleet:
        greeted = len(asked)
        with pytest.raises(ValueError, match="policy is 'wait'"):
            fleet.refit(model, policy="wait")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"catch_up\(\) has no option 'only'"):
            fleet.catch_up(model, only=["weight"])  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="deadline_seconds is nan"):
            fleet.generate([[1]], deadline_seconds=math.nan)
        with pytest.raises(TypeError, match=r"has no option 'group'; it has allow_mixed_versions.*groups"):
            fleet.stream([[1]], group=[1])  # type: ignore[call-arg]
        assert len(asked) == greeted


def test_a_fleets_own_options_are_none_of_a_daemons() -> None:
    """They are taken as any sequence and any object; a daemon is not told of them."""
    assert order_of([[1], [2]], None, {"groups": range(2), "allow_mixed_versions": True}, whole=True).mixed


def test_what_the_protocol_allows_may_be_said(peer: Peer) -> None:
    """Every value of its types, whatever they will be."""
    for policy in (*get_args(InflightPolicy), None):
        for attest in (*get_args(AttestMode), None):
            check_options("refit", {"policy": policy, "attest": attest, "only": ("a", "b")}, RefitOptions)
    check_options("prepare_refit", {"hold_seconds": 1, "version": None, "deadline_seconds": 0.5}, PrepareOptions)
    peer.answer = lambda asked: asked.reply(SleepStateChanged(level=2, asleep_tags=["weights"], servable=False))
    with Daemon.connect(peer.endpoint, lease_seconds=1e6, patience_seconds=0) as daemon:
        assert daemon.sleep(2, "abort").level == 2


def test_any_sampling_that_the_protocol_has_may_be_asked_for() -> None:
    sampling = Sampling(
        stop=["x"], logit_bias=[(3, 1)], allowed_token_ids=[1], structured=StructuredOutputs(json={"type": "object"})
    )
    generate_command([[1]], sampling, {})
    with pytest.raises(TypeError, match=r"sampling is a dict: it has to be Sampling\(...\)"):
        generate_command([[1]], {"n": 4}, {})  # type: ignore[arg-type]


def test_the_time_for_a_generation_may_be_over() -> None:
    """A caller counts down what is left of its own; the daemon says that nothing is."""
    order_of([[1]], None, {"deadline_seconds": -0.5}, whole=True)


@pytest.mark.parametrize(
    "kind", [ConnectOptions, FleetOptions, PrepareOptions, GenerateOptions, Sampling, Sleep, WakeUp]
)
def test_there_are_words_for_whatever_may_be_said(kind: type) -> None:
    """Also of fields that are still to come."""
    for name in get_type_hints(kind):
        with pytest.raises((TypeError, ValueError), match=f"{name} is .*: it has to be "):
            check_options("call", {name: object()}, kind)


def test_long_values_are_cut_short() -> None:
    with pytest.raises(TypeError) as refused:
        check_options("refit", {"only": "x" * 1_000_000}, RefitOptions)
    assert len(str(refused.value)) < 200
