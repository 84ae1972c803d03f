"""Bucket refits: whatever the cut and the order, the result is that of a fresh load; half a refit is told."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import pytest
import torch

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import BucketPiece, DType, TensorShape
from refitd.worker.boundary import to_the_end
from refitd.worker.buckets import Arrivals, Coverage
from tests.worker.engines import LoadedWorker, differences
from tests.worker.models import Kind
from tests.worker.trainers import ExportedMemory

Weights = dict[str, torch.Tensor]
SOURCE = 3


def announced(weights: Weights) -> list[dict[str, Any]]:
    return [
        {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for name, tensor in weights.items()
    ]


def buckets_of(weights: Weights, bucket_bytes: int) -> Iterator[list[tuple[str, int, torch.Tensor]]]:
    """(name, first element, elements) cut so that each list fits into a bucket."""
    bucket: list[tuple[str, int, torch.Tensor]] = []
    used = 0
    for name, tensor in weights.items():
        flat, first = tensor.reshape(-1), 0
        while first < flat.numel():
            room = (bucket_bytes - used) // tensor.element_size()
            if room < 1:
                yield bucket
                bucket, used = [], 0
                continue
            piece = flat[first : first + room]
            bucket.append((name, first, piece))
            first, used = first + piece.numel(), used + piece.nbytes
    yield bucket


def push(
    worker: LoadedWorker, memories: list[ExportedMemory], number: int, pieces: list[tuple[str, int, torch.Tensor]]
) -> None:
    """Packs one bucket and has the worker read it."""
    memory, offset, described = memories[number], 0, []
    for name, first, piece in pieces:
        offset = -(-offset // piece.element_size()) * piece.element_size()
        memory.view(piece.dtype, offset, piece.shape, (1,)).copy_(piece)
        described.append({"name": name, "first": first, "count": piece.numel(), "offset_bytes": offset})
        offset += piece.nbytes
    worker.call("refitd_apply_bucket", number, described)


def refit(worker: LoadedWorker, memories: list[ExportedMemory], weights: Weights, bucket_bytes: int) -> dict[str, Any]:
    """A whole refit through alternating buckets, tensors in random order."""
    names = list(weights)
    random.Random(bucket_bytes).shuffle(names)
    worker.call("refitd_begin", SOURCE, announced(weights))
    for count, pieces in enumerate(buckets_of({name: weights[name] for name in names}, bucket_bytes)):
        push(worker, memories, count % len(memories), pieces)
    return worker.call("refitd_finish", "full")


@pytest.fixture
def memories() -> Iterator[list[ExportedMemory]]:
    """Two buckets of 4 MiB, of which tests use as much as they like."""
    with ExportedMemory(4 << 20) as one, ExportedMemory(4 << 20) as other:
        yield [one, other]


@pytest.fixture
def bucket_worker(
    request: pytest.FixtureRequest, worker_of: Callable[[Kind], LoadedWorker], memories: list[ExportedMemory]
) -> Iterator[LoadedWorker]:
    """A worker of the kind the test is parametrized with (Qwen3 without), with an open bucket source."""
    worker = worker_of(getattr(request, "param", "qwen3"))
    worker.call("refitd_open_source", SOURCE, "bucket", [memory.segment for memory in memories], [])
    yield worker
    worker.call("refitd_close_source", SOURCE)


@pytest.mark.parametrize(
    ("bucket_worker", "kind"), [("qwen3_moe", "qwen3_moe"), ("qwen3_tied", "qwen3_tied")], indirect=["bucket_worker"]
)
def test_any_bucket_size_gives_the_fresh_load(
    kind: Kind,
    bucket_worker: LoadedWorker,
    memories: list[ExportedMemory],
    weights_of: Callable[[Kind, int], Weights],
    fresh: Callable[[Kind, int], Weights],
) -> None:
    """Buckets around the largest tensor's size, larger than the model, and a tenth of it with cuts inside rows."""
    largest = max(tensor.nbytes for tensor in weights_of(kind, 0).values())
    sizes = [largest - 2, largest, largest + 2, 4 << 20, largest // 10 + 1, 1026]
    for turn, size in enumerate(sizes):
        finished = refit(bucket_worker, memories, weights_of(kind, turn % 2), size)
        assert finished["path"] == "plan"
        assert differences(bucket_worker.served(), fresh(kind, turn % 2)) == []


def test_other_dtypes_are_cast(
    bucket_worker: LoadedWorker,
    memories: list[ExportedMemory],
    weights_of: Callable[[Kind, int], Weights],
    fresh: Callable[[Kind, int], Weights],
) -> None:
    """float32 pieces arrive as their cast, and odd element sizes may follow each other in a bucket."""
    weights = {
        name: tensor.to((torch.float32, torch.bfloat16)[index % 2])
        for index, (name, tensor) in enumerate(weights_of("qwen3", 1).items())
    }
    refit(bucket_worker, memories, weights, 100_003)
    assert differences(bucket_worker.served(), fresh("qwen3", 1)) == []


def test_incomplete_refits_are_refused_and_say_what_is_missing(
    bucket_worker: LoadedWorker, memories: list[ExportedMemory], weights_of: Callable[[Kind, int], Weights]
) -> None:
    """The answer says that bytes were written: the daemon must not serve them."""
    weights = weights_of("qwen3", 1)
    bucket_worker.call("refitd_begin", SOURCE, announced(weights))
    push(bucket_worker, memories, 0, [("model.norm.weight", 3, weights["model.norm.weight"][3:])])
    code, details, wrote = bucket_worker.refused("refitd_finish")
    assert (code, wrote) == ("manifest_mismatch", True)
    assert {"name": "model.norm.weight", "expected": 128, "received": 125} in details["incomplete"]
    assert len(details["incomplete"]) == len(weights)
    assert bucket_worker.call("refitd_abort")["wrote"]


def test_elements_that_came_before_are_refused_unread(
    bucket_worker: LoadedWorker, memories: list[ExportedMemory], weights_of: Callable[[Kind, int], Weights]
) -> None:
    """Nothing of such a bucket reaches the engine."""
    weights = weights_of("qwen3", 1)
    bucket_worker.call("refitd_begin", SOURCE, announced(weights))
    before = bucket_worker.served()
    pieces = [{"name": "model.norm.weight", "first": first, "count": 3, "offset_bytes": 0} for first in (10, 12)]
    code, _, wrote = bucket_worker.refused("refitd_apply_bucket", 0, pieces)
    assert (code, wrote) == ("invalid_descriptor", False)
    assert differences(bucket_worker.served(), before) == []
    assert not bucket_worker.call("refitd_abort")["wrote"]


def test_a_bucket_of_a_refit_that_has_ended_leaves_the_next_one_alone(
    bucket_worker: LoadedWorker,
    memories: list[ExportedMemory],
    weights_of: Callable[[Kind, int], Weights],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was still waiting for its memory to be written."""
    weights, norm = weights_of("qwen3", 1), "model.norm.weight"
    bucket_worker.call("refitd_begin", SOURCE, announced(weights))
    segments = bucket_worker.worker.refitd_kept_state.sources[SOURCE].segments
    with monkeypatch.context() as patch:
        patch.setattr(segments, "turns_until_written", lambda _: repeat(None))
        pieces = [{"name": norm, "first": 0, "count": 3, "offset_bytes": 0}]
        turns = bucket_worker.worker.refitd_apply_bucket_in_turns(0, pieces)
        next(turns)
    bucket_worker.call("refitd_abort")
    bucket_worker.call("refitd_begin", SOURCE, announced(weights))
    assert to_the_end(turns)["error"]["code"] == "unknown_refit"
    push(bucket_worker, memories, 0, [(norm, 3, weights[norm][3:])])


def test_the_end_waits_for_the_buckets_before_it(
    bucket_worker: LoadedWorker,
    memories: list[ExportedMemory],
    weights_of: Callable[[Kind, int], Weights],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In turns, too: it is called while the last bucket is still being written, and answers when all has arrived."""
    fresh, weights = weights_of("qwen3", 2), weights_of("qwen3", 1)
    refit(bucket_worker, memories, fresh, 1 << 20)
    digest = refit(bucket_worker, memories, weights, 1 << 20)["digest"]
    refit(bucket_worker, memories, fresh, 1 << 20)
    last = "model.norm.weight"
    bucket_worker.call("refitd_begin", SOURCE, announced(weights))
    others = {name: tensor for name, tensor in weights.items() if name != last}
    for pieces in buckets_of(others, 1 << 20):
        push(bucket_worker, memories, 0, pieces)
    memories[1].view(weights[last].dtype, 0, weights[last].shape, (1,)).copy_(weights[last])
    waited = iter(range(3))
    segments = bucket_worker.worker.refitd_kept_state.sources[SOURCE].segments
    with monkeypatch.context() as patch:
        patch.setattr(segments, "turns_until_written", lambda _: (None for _ in waited))
        piece = {"name": last, "first": 0, "count": weights[last].numel(), "offset_bytes": 0}
        bucket = bucket_worker.worker.refitd_apply_bucket_in_turns(1, [piece])
        next(bucket)
        end = bucket_worker.worker.refitd_finish_in_turns("full", False)
        next(end)
        assert to_the_end(bucket)["ok"]
    answer = to_the_end(end)
    assert answer["digest"] == digest
    assert not next(waited, None)
    assert bucket_worker.refused("refitd_finish")[0] == "unknown_refit"


def test_a_refused_end_knows_of_what_is_written_before_it(
    bucket_worker: LoadedWorker,
    memories: list[ExportedMemory],
    weights_of: Callable[[Kind, int], Weights],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a bucket that was still being written when the end was called; else half a refit would be served."""
    weights, norm = weights_of("qwen3", 1), "model.norm.weight"
    refit(bucket_worker, memories, weights, 1 << 20)
    bucket_worker.call("refitd_begin", SOURCE, announced(weights))
    segments = bucket_worker.worker.refitd_kept_state.sources[SOURCE].segments
    with monkeypatch.context() as patch:
        patch.setattr(segments, "turns_until_written", lambda _: repeat(None, 3))
        pieces = [{"name": norm, "first": 0, "count": 3, "offset_bytes": 0}]
        bucket = bucket_worker.worker.refitd_apply_bucket_in_turns(0, pieces)
        next(bucket)
        end = bucket_worker.worker.refitd_finish_in_turns()
        next(end)
        assert to_the_end(bucket)["ok"]
    answer = to_the_end(end)
    assert (answer["error"]["code"], answer["wrote"]) == ("manifest_mismatch", True)
    assert bucket_worker.call("refitd_abort")["wrote"]


def test_buckets_behind_a_begin_that_is_refused_find_no_refit(
    bucket_worker: LoadedWorker, memories: list[ExportedMemory], weights_of: Callable[[Kind, int], Weights]
) -> None:
    """Not the one that was under way before, either."""
    weights = weights_of("qwen3", 1)
    bucket_worker.call("refitd_begin", SOURCE, announced(weights))
    before = bucket_worker.served()
    code, _, _ = bucket_worker.refused("refitd_begin", SOURCE, announced({"no.such": torch.ones(1)}))
    assert code == "manifest_mismatch"
    pieces = [{"name": "model.norm.weight", "first": 0, "count": 3, "offset_bytes": 0}]
    code, _, wrote = bucket_worker.refused("refitd_apply_bucket", 0, pieces)
    assert (code, wrote) == ("unknown_refit", False)
    assert differences(bucket_worker.served(), before) == []


def test_the_end_behind_a_bucket_that_fails_is_refused(
    bucket_worker: LoadedWorker, memories: list[ExportedMemory], weights_of: Callable[[Kind, int], Weights]
) -> None:
    """It was called before the failure, and says whether anything was written."""
    weights = weights_of("qwen3", 1)
    bucket_worker.call("refitd_begin", SOURCE, announced(weights))
    refit_under_way = bucket_worker.worker.refitd_kept_state.refit
    for pieces in buckets_of(weights, 1 << 20):
        push(bucket_worker, memories, 0, pieces)
    refit_under_way._begun -= 1
    end = bucket_worker.worker.refitd_finish_in_turns("sampled", False)
    next(end)
    bucket_worker.refused(
        "refitd_apply_bucket", 0, [{"name": "model.norm.weight", "first": 0, "count": 3, "offset_bytes": 0}]
    )
    answer = to_the_end(end)
    assert (answer["error"]["code"], answer["wrote"]) == ("unknown_refit", True)


def test_a_call_in_turns_that_nobody_could_make_is_an_answer(bucket_worker: LoadedWorker) -> None:
    """Else it would end the line, and with it the engine."""
    answer = to_the_end(bucket_worker.worker.refitd_apply_bucket_in_turns())
    assert "missing 2 required positional arguments" in answer["error"]["message"]


def test_announcements_are_checked_before_anything_is_written(
    bucket_worker: LoadedWorker, weights_of: Callable[[Kind, int], Weights]
) -> None:
    """Missing, unexpected, misshapen and integer tensors are listed together."""
    weights = announced(weights_of("qwen3", 1))
    dropped = weights.pop()["name"]
    weights[0]["shape"] = [1, 2]
    weights[1]["dtype"] = "int8"
    weights.append({"name": "stranger", "dtype": "bfloat16", "shape": [1]})
    code, details, wrote = bucket_worker.refused("refitd_begin", SOURCE, weights)
    assert (code, wrote) == ("manifest_mismatch", False)
    assert (details["missing"], details["unexpected"]) == ([dropped], ["stranger"])
    assert [item["name"] for item in details["shape"] + details["dtype"]] == [weights[0]["name"], weights[1]["name"]]


def test_what_came_whole_before_is_still_checked(
    bucket_worker: LoadedWorker,
    memories: list[ExportedMemory],
    weights_of: Callable[[Kind, int], Weights],
    fresh: Callable[[Kind, int], Weights],
) -> None:
    """After a refit that was complete: one that ends early, one that brings an element twice, one in another order."""
    weights = weights_of("qwen3", 1)
    refit(bucket_worker, memories, weights_of("qwen3", 0), 60_000)
    names = list(weights)
    random.Random(60_000).shuffle(names)
    buckets = list(buckets_of({name: weights[name] for name in names}, 60_000))
    assert len(buckets) > 2

    bucket_worker.call("refitd_begin", SOURCE, announced(weights))
    for number, pieces in enumerate(buckets[:-1]):
        push(bucket_worker, memories, number % 2, pieces)
    code, details, _ = bucket_worker.refused("refitd_finish")
    assert code == "manifest_mismatch"
    assert {item["name"] for item in details["incomplete"]} == {name for name, _, _ in buckets[-1]}
    bucket_worker.call("refitd_abort")

    bucket_worker.call("refitd_begin", SOURCE, announced(weights))
    push(bucket_worker, memories, 0, buckets[0])
    again = [{"name": name, "first": first, "count": 1, "offset_bytes": 0} for name, first, _ in buckets[0][:1]]
    assert bucket_worker.refused("refitd_apply_bucket", 1, again)[0] == "invalid_descriptor"

    bucket_worker.call("refitd_begin", SOURCE, announced(weights))
    for number, pieces in enumerate([buckets[0], *reversed(buckets[1:])]):
        push(bucket_worker, memories, number % 2, pieces)
    bucket_worker.call("refitd_finish")
    assert differences(bucket_worker.served(), fresh("qwen3", 1)) == []


def test_validation_of_another_layout_leaves_the_refit_alone(
    bucket_worker: LoadedWorker, memories: list[ExportedMemory], weights_of: Callable[[Kind, int], Weights]
) -> None:
    """The same pieces of another dtype are other bytes: neither refit goes by what was compiled for the other."""
    halves = {name: tensor.half() for name, tensor in weights_of("qwen3", 1).items()}
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in halves.items()}
    refit(bucket_worker, memories, weights, 60_000)
    expected = bucket_worker.served()
    bucket_worker.call("refitd_begin", SOURCE, announced(weights))
    for number, pieces in enumerate(buckets_of(weights, 60_000)):
        push(bucket_worker, memories, number % 2, pieces)
        bucket_worker.call("refitd_validate", SOURCE, announced(halves))
    bucket_worker.call("refitd_finish")
    assert differences(bucket_worker.served(), expected) == []
    bucket_worker.call("refitd_begin", SOURCE, announced(halves))
    for number, pieces in enumerate(buckets_of(halves, 60_000)):
        push(bucket_worker, memories, number % 2, pieces)
    bucket_worker.call("refitd_finish")
    assert differences(bucket_worker.served(), expected) == []


@pytest.mark.parametrize("bucket_worker", ["qwen3_tied"], indirect=True)
def test_tied_heads_may_come_equal(
    bucket_worker: LoadedWorker,
    memories: list[ExportedMemory],
    weights_of: Callable[[Kind, int], Weights],
    fresh: Callable[[Kind, int], Weights],
) -> None:
    """A head that differs from its embedding is an error, not a silent choice of one of them."""
    weights = dict(weights_of("qwen3_tied", 1))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    refit(bucket_worker, memories, weights, 50_000)
    assert differences(bucket_worker.served(), fresh("qwen3_tied", 1)) == []
    weights["lm_head.weight"][500, 3] += 1
    bucket_worker.call("refitd_begin", SOURCE, announced(weights))
    for pieces in buckets_of(weights, 4 << 20):
        push(bucket_worker, memories, 0, pieces)
    code, details, wrote = bucket_worker.refused("refitd_finish")
    assert (code, details["different"], wrote) == ("manifest_mismatch", ["lm_head.weight"], True)


def test_loader_path_stages_pieces(
    bucket_worker: LoadedWorker,
    memories: list[ExportedMemory],
    weights_of: Callable[[Kind, int], Weights],
    fresh: Callable[[Kind, int], Weights],
) -> None:
    """With the plan off, whole tensors are put together and handed to vLLM's loader."""
    weights = weights_of("qwen3", 1)
    bucket_worker.call("refitd_begin", SOURCE, announced(weights), False, "off")
    for pieces in buckets_of(weights, 30_000):
        push(bucket_worker, memories, 0, pieces)
    assert bucket_worker.call("refitd_finish")["path"] == "loader"
    assert differences(bucket_worker.served(), fresh("qwen3", 1)) == []


def test_partial_refits_leave_the_rest_alone(
    bucket_worker: LoadedWorker,
    memories: list[ExportedMemory],
    weights_of: Callable[[Kind, int], Weights],
    fresh: Callable[[Kind, int], Weights],
) -> None:
    """Only the named tensors move, even one of three that share a fused parameter."""
    refit(bucket_worker, memories, weights_of("qwen3", 0), 4 << 20)
    name = "model.layers.1.self_attn.k_proj.weight"
    part = {name: weights_of("qwen3", 1)[name]}
    bucket_worker.call("refitd_begin", SOURCE, announced(part), True)
    push(bucket_worker, memories, 0, [(name, 0, part[name].reshape(-1))])
    bucket_worker.call("refitd_finish")
    served, old, new = bucket_worker.served(), fresh("qwen3", 0), fresh("qwen3", 1)
    fused = "model.layers.1.self_attn.qkv_proj.weight"
    assert differences(served, old) == [fused]
    assert torch.equal(served[fused], torch.cat([old[fused][:128], new[fused][128:192], old[fused][192:]]))


def test_coverage_counts_ranges_in_any_order() -> None:
    """Ranges may touch, not overlap, and empty ones are harmless."""
    coverage = Coverage(TensorShape(name="t", dtype=DType.BFLOAT16, shape=(10, 10)))
    for first, count in ((50, 50), (0, 10), (20, 30), (15, 0), (10, 10)):
        assert not coverage.is_complete
        coverage.add(first, count)
    assert coverage.is_complete
    with pytest.raises(ProtocolError) as caught:
        coverage.add(99, 1)
    assert caught.value.code is ErrorCode.INVALID_DESCRIPTOR


def piece(name: str, first: int, count: int) -> BucketPiece:
    return BucketPiece(name=name, first=first, count=count, offset_bytes=0)


WHOLE = [(piece("a", 0, 6), piece("b", 0, 2)), (piece("b", 2, 2),), (piece("a", 6, 4), piece("empty", 0, 0))]


@pytest.mark.parametrize("known", [WHOLE, []], ids=["known", "counted"])
@pytest.mark.parametrize(
    ("came", "missing"),
    [
        (WHOLE, {}),
        (WHOLE[::-1], {}),
        ([WHOLE[0], WHOLE[2], WHOLE[1]], {}),
        ([], {"a": 0, "b": 0}),
        (WHOLE[:2], {"a": 6}),
        ([WHOLE[0], WHOLE[2]], {"b": 2}),
        ([*WHOLE[:2], (piece("a", 6, 3),)], {"a": 9}),
    ],
)
def test_what_has_come_is_known_with_and_without_counting(
    known: list[tuple[BucketPiece, ...]], came: list[tuple[BucketPiece, ...]], missing: dict[str, int]
) -> None:
    """Whether pieces are those that made the tensors whole before, partly or in another order, or are new."""
    shapes = {"a": (2, 5), "b": (4,), "empty": (0,)}
    arrivals = Arrivals(
        {name: TensorShape(name=name, dtype=DType.BFLOAT16, shape=shape) for name, shape in shapes.items()}, known
    )
    for pieces in came:
        arrivals.add(pieces)
    assert {item["name"]: item["received"] for item in arrivals.incomplete()} == missing
    if came:
        with pytest.raises(ProtocolError) as caught:
            arrivals.add((piece(came[0][0].name, came[0][0].first, 1),))
        assert caught.value.code is ErrorCode.INVALID_DESCRIPTOR
