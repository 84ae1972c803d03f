"""Messages cut into deltas, deltas joined to samples."""

from __future__ import annotations

import numpy as np
import pytest

from refit_protocol.messages import TokenDelta, VersionRun
from refit_trainer.stream import SampleAssembler, cut, merged_runs


def described(count: int, position: int = 0, **more: object) -> TokenDelta:
    return TokenDelta(
        request=1, prompt=0, output=0, position=position, count=count, versions=[VersionRun(1, count)], **more
    )


def ints(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def test_every_delta_gets_its_own_columns() -> None:
    """Optional blobs hold values only for the deltas that announce them."""
    deltas = [
        described(1),
        described(2, top=2),
        described(1, prompt_top=1, prompt_rows=2, routed_experts=[1, 2]),
    ]
    blobs = [
        ints(10, 20, 21, 30),
        floats(1, 2, 2.5, 3),
        ints(5, 6, 7, 8),
        floats(-5, -6, -7, -8),
        ints(1, 11, 2, 12),
        floats(np.nan, np.nan, -2, -12),
        ints(3, 4),
    ]
    plain, with_top, with_prompt = cut(deltas, blobs)
    assert (plain.token_ids.tolist(), plain.logprobs.tolist(), plain.top) == ([10], [1.0], None)
    assert with_top.token_ids.tolist() == [20, 21]
    assert with_top.top.token_ids.tolist() == [[5, 6], [7, 8]]
    assert with_top.top.logprobs.tolist() == [[-5, -6], [-7, -8]]
    assert with_prompt.prompt_logprobs.token_ids.tolist() == [[1, 11], [2, 12]]
    assert with_prompt.prompt_logprobs.logprobs[1].tolist() == [-2, -12]
    assert with_prompt.routed_experts.tolist() == [[3, 4]]


@pytest.mark.parametrize(
    ("deltas", "blobs"),
    [
        ([described(2)], [ints(1), floats(1, 2)]),
        ([described(1)], [ints(1, 2), floats(1, 2)]),
        ([described(1)], [ints(1), floats()]),
        ([described(1)], []),
        ([described(1, top=2)], [ints(1), floats(1)]),
        ([described(1, top=2)], [ints(1), floats(1), ints(1, 2), floats(1)]),
        ([described(1)], [b"abc", floats(1)]),
    ],
)
def test_blobs_that_do_not_fit_are_refused(deltas: list[TokenDelta], blobs: list[bytes]) -> None:
    """Tokens are never made up, and none are dropped."""
    with pytest.raises(ValueError, match=r"\d|buffer"):
        cut(deltas, blobs)


def test_sample_joins_its_deltas() -> None:
    """Arrays, version runs and texts of all of them, the end of the last, the cache hit of the first."""
    deltas = cut(
        [
            described(1, text="a", cached_tokens=16),
            described(2, 1, text="b", finish_reason="stop", stop_reason=7),
        ],
        [ints(10, 11, 12), floats(1, 2, 3)],
    )
    assembler = SampleAssembler()
    assert assembler.add(deltas[0]) is None
    sample = assembler.add(deltas[1])
    assert sample.token_ids.tolist() == [10, 11, 12]
    assert sample.logprobs.tolist() == [1, 2, 3]
    assert sample.versions == [VersionRun(1, 3)]
    assert (sample.text, sample.finish_reason, sample.stop_reason, sample.cached_tokens) == ("ab", "stop", 7, 16)


def test_version_of_a_mixed_sample_is_none() -> None:
    """A sample that spans a refit has no one version; its runs say which tokens are whose."""
    first = described(1)
    second = TokenDelta(
        request=1, prompt=0, output=0, position=1, count=1, versions=[VersionRun(2, 1)], finish_reason="stop"
    )
    assembler = SampleAssembler()
    samples = [assembler.add(delta) for delta in cut([first, second], [ints(1, 2), floats(1, 2)])]
    assert samples[1].versions == [VersionRun(1, 1), VersionRun(2, 1)]
    assert samples[1].version is None


def test_neighbouring_runs_of_one_version_are_merged() -> None:
    """And empty ones are left out."""
    runs = [VersionRun(1, 2), VersionRun(1, 3), VersionRun(2, 0), VersionRun(2, 1), VersionRun(1, 1)]
    assert merged_runs(runs) == [VersionRun(1, 5), VersionRun(2, 1), VersionRun(1, 1)]
