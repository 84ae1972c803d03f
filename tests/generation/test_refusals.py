"""What is refused before the engine sees it, by name; the engine and everybody else's requests notice nothing."""

from __future__ import annotations

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import Generate, ModelInfo, Sampling, StructuredOutputs
from refit_trainer import Daemon, RefitdError
from refitd.engine import EngineInfo
from refitd.prompts import Prompts
from refitd.sampling import resolve
from tests.canary import unharmed
from tests.conftest import PROMPT

MODEL = ModelInfo(name="m", vocab_size=512, max_model_len=256, dtype="bfloat16", eos_token_ids=[1, 3])
ENGINE = EngineInfo(
    model=MODEL,
    manifest=[],
    devices=[],
    vllm_version="",
    logprobs_mode="processed_logprobs",
    load_seconds=0.0,
    max_logprobs=20,
    has_tokenizer=True,
    priorities=True,
    routed_experts=False,
)
NAN, INFINITY = float("nan"), float("inf")

SAMPLINGS: dict[str, Sampling] = {
    "n": Sampling(n=0),
    "max_tokens": Sampling(max_tokens=0),
    "min_tokens": Sampling(min_tokens=-1),
    "min_tokens is 9": Sampling(min_tokens=9, max_tokens=8),
    "temperature": Sampling(temperature=-0.1),
    "temperature is nan": Sampling(temperature=NAN),
    "temperature is inf": Sampling(temperature=INFINITY),
    "top_p is 0": Sampling(top_p=0.0),
    "top_p is 1.1": Sampling(top_p=1.1),
    "top_k": Sampling(top_k=-2),
    "min_p": Sampling(min_p=1.5),
    "presence_penalty": Sampling(presence_penalty=2.5),
    "frequency_penalty": Sampling(frequency_penalty=-2.5),
    "repetition_penalty": Sampling(repetition_penalty=0.0),
    "seed": Sampling(seed=2**63),
    "stop holds an empty": Sampling(stop=["a", ""]),
    "stop holds 65": Sampling(stop=["a"] * 65),
    "bad_words holds an empty": Sampling(bad_words=[""]),
    "stop_token_ids: id 512": Sampling(stop_token_ids=[512]),
    "stop_token_ids: id 5 comes twice": Sampling(stop_token_ids=[5, 5]),
    "logit_bias: id -1": Sampling(logit_bias=[(-1, 1.0)]),
    "logit_bias: id 4 comes twice": Sampling(logit_bias=[(4, 1.0), (4, 2.0)]),
    "logit_bias: nan": Sampling(logit_bias=[(4, NAN)]),
    "allowed_token_ids: id 600": Sampling(allowed_token_ids=[600]),
    "allowed_token_ids is empty": Sampling(allowed_token_ids=[]),
    "logprobs is 21": Sampling(logprobs=21),
    "logprobs is -1": Sampling(logprobs=-1),
    "prompt_logprobs is 21": Sampling(prompt_logprobs=21),
    "structured names 0": Sampling(structured=StructuredOutputs()),
    "structured names 2": Sampling(structured=StructuredOutputs(regex="a", choice=["a"])),
    "structured.regex is empty": Sampling(structured=StructuredOutputs(regex="")),
    "structured.choice is empty": Sampling(structured=StructuredOutputs(choice=[])),
    "structured.grammar has": Sampling(structured=StructuredOutputs(grammar="x" * 70_000)),
    "structured.regex is nested": Sampling(structured=StructuredOutputs(regex="(" * 40 + ")" * 40)),
    "structured.json is nested": Sampling(structured=StructuredOutputs(json="[" * 40 + "]" * 40)),
}
REQUESTS: dict[str, Generate] = {
    "max_version_lag needs": Generate(max_version_lag=1),
    "max_version_lag is -1": Generate(min_version=1, max_version_lag=-1),
    "deadline_seconds is nan": Generate(deadline_seconds=NAN),
    "priority": Generate(priority=2**31),
}


@pytest.mark.parametrize("named", list(SAMPLINGS))
def test_a_sampling_that_cannot_be_is_refused_by_name(named: str) -> None:
    with pytest.raises(Exception, match=named) as refused:
        resolve(Generate(sampling=SAMPLINGS[named]), Prompts([[5, 6]]), ENGINE)
    assert refused.value.code is ErrorCode.INVALID_SAMPLING


@pytest.mark.parametrize("named", list(REQUESTS))
def test_a_request_that_cannot_be_is_refused_by_name(named: str) -> None:
    with pytest.raises(Exception, match=named) as refused:
        resolve(REQUESTS[named], Prompts([[5, 6]]), ENGINE)
    assert refused.value.code is ErrorCode.INVALID_SAMPLING


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_deadline_that_is_over_already_says_so(seconds: float) -> None:
    """As for a refit: it is no mistake in the message, and the same request with more time may work."""
    with pytest.raises(ProtocolError, match="none is left") as refused:
        resolve(Generate(deadline_seconds=seconds), Prompts([[5, 6]]), ENGINE)
    assert refused.value.code is ErrorCode.DEADLINE_EXCEEDED


def test_every_extreme_that_can_be_is_let_through() -> None:
    """The borders themselves are inside."""
    sampling = Sampling(
        temperature=0.0, top_p=1e-9, top_k=-1, min_p=1.0, presence_penalty=-2.0, frequency_penalty=2.0, logprobs=20
    )
    resolved = resolve(Generate(sampling=sampling, priority=-7), Prompts([[5] * 255]), ENGINE)
    assert resolved.max_tokens == [1]


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        ({"lora": "kind"}, ErrorCode.UNSUPPORTED, "lora.enabled"),
        ({"routed_experts": True}, ErrorCode.UNSUPPORTED, "mixture-of-experts"),
        (
            {"sampling": Sampling(structured=StructuredOutputs(regex="(["))},
            ErrorCode.INVALID_SAMPLING,
            "invalid_sampling",
        ),
        (
            {"sampling": Sampling(structured=StructuredOutputs(json={"type": "nothing"}))},
            ErrorCode.INVALID_SAMPLING,
            "nothing",
        ),
        (
            {"sampling": Sampling(structured=StructuredOutputs(grammar="root ::= root"))},
            ErrorCode.INVALID_SAMPLING,
            "allows no text at all",
        ),
        ({"sampling": Sampling(temperature=2.5)}, ErrorCode.INVALID_SAMPLING, "temperature"),
    ],
)
def test_the_daemon_refuses_before_it_starts(
    daemon: Daemon, options: dict[str, object], code: ErrorCode, named: str
) -> None:
    """Also what only vLLM can judge; no reply but the refusal comes."""
    with unharmed(daemon):
        replies = daemon.stream([PROMPT], **options)
        with pytest.raises(RefitdError, match=named) as refused:
            list(replies)
        assert refused.value.code is code
        assert replies.resolved is None
