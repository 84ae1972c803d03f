"""Device memory of another process: exported by the trainer, opened by the worker, refused when it is wrong."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec
import pytest
import torch

pytest.importorskip("cupy", reason="needs CuPy, of the extra cuda12 or cuda13")

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import CudaIpcSegment
from refit_trainer import NotShareable, share_parameters
from refit_trainer.sharing import shared_module
from refitd.worker.cuda_memory import CudaIpcMapping, device_uuid
from tests.gpu.peers import Peer, peer

ODD_ELEMENTS = 1003


def exporter(connection: Connection, size_bytes: int) -> None:
    """Exports odd pieces of one storage and a tensor of its own; then does as it is told."""
    from refit_trainer.cuda_memory import CudaBackend

    whole = torch.arange(size_bytes, device="cuda", dtype=torch.int64).to(torch.uint8)
    tensors = [whole[3 : 3 + ODD_ELEMENTS], whole[4096:8192], torch.full((5000,), 7.0, device="cuda")]
    memory = CudaBackend().share(tensors)
    while True:
        match connection.recv():
            case "describe":
                memory.synchronise()
                connection.send((memory.segments, [memory.locate(tensor) for tensor in tensors]))
            case "values":
                connection.send([tensor.cpu() for tensor in tensors])
            case ("write after", milliseconds, value):
                torch.cuda._sleep(int(milliseconds * 1e6))
                tensors[1].fill_(value)
                memory.synchronise()
                connection.send("enqueued")
            case "exportable":
                from refit_trainer.cuda_memory import allocation_of

                connection.send([allocation_of(tensor).handle is not None for tensor in tensors])


def described(trainer: Peer) -> tuple[list[CudaIpcSegment], list[tuple[int, int]]]:
    answer: tuple[list[CudaIpcSegment], list[tuple[int, int]]] = trainer.ask("describe")
    return answer


def test_several_tensors_of_one_segment_are_read_at_their_odd_offsets(device: torch.device) -> None:
    """What is seen through the mapping is what the trainer holds, for pieces of shared storage too."""
    with peer(exporter, 1 << 20) as trainer:
        segments, places = described(trainer)
        mappings = [CudaIpcMapping(segment, device) for segment in segments]
        for (segment, offset), value in zip(places, trainer.ask("values"), strict=True):
            seen = mappings[segment].data[offset : offset + value.nbytes].cpu()
            assert torch.equal(seen, value.view(torch.uint8))
        for mapping in mappings:
            mapping.close()


def test_reads_come_after_the_writes_that_the_trainer_had_enqueued(device: torch.device) -> None:
    """The trainer only enqueues a long kernel and then the write; the event orders our read behind it."""
    with peer(exporter, 1 << 20) as trainer:
        segments, places = described(trainer)
        segment, offset = places[1]
        mapping = CudaIpcMapping(segments[segment], device)
        for round_ in range(20):
            trainer.ask(("write after", 5, round_ + 1))
            assert mapping.written is not None
            mapping.written.wait()
            assert mapping.data[offset : offset + 4096].eq(round_ + 1).all()
        mapping.close()


def test_memory_of_expandable_segments_is_moved_where_it_can_be_exported(device: torch.device) -> None:
    """An exporter under expandable segments still shares its tensors, with their values."""
    with peer(exporter, 1 << 20, environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}) as trainer:
        segments, places = described(trainer)
        assert trainer.ask("exportable") == [True, True, True]
        mapping = CudaIpcMapping(segments[places[1][0]], device)
        assert torch.equal(mapping.data[places[1][1] :][:4096].cpu(), trainer.ask("values")[1])
        mapping.close()


def test_one_allocation_is_opened_once_and_closed_with_its_last_user(device: torch.device) -> None:
    """Two mappings of one handle share the mapping; after both are closed it can be opened anew."""
    with peer(exporter, 1 << 20) as trainer:
        segment = described(trainer)[0][0]
        first, second = CudaIpcMapping(segment, device), CudaIpcMapping(segment, device)
        assert first.data.data_ptr() == second.data.data_ptr()
        first.close()
        assert second.data[:16].sum() >= 0
        second.close()
        again = CudaIpcMapping(segment, device)
        again.close()


def test_mapping_and_closing_300_times_leaves_device_memory_as_it_was(device: torch.device) -> None:
    """Opening is undone by closing."""
    with peer(exporter, 64 << 20) as trainer:
        segment = described(trainer)[0][0]
        for _ in range(5):
            CudaIpcMapping(segment, device).close()
        before = torch.cuda.mem_get_info(device)[0]
        for _ in range(300):
            CudaIpcMapping(segment, device).close()
        assert torch.cuda.mem_get_info(device)[0] >= before - (1 << 20)


def offloaded_to_the_same_address(model: torch.nn.Module, device: torch.device) -> bool:
    """To the CPU and back, with the memory given back to the device in between; False where it lies elsewhere then."""
    address = model.weight.data_ptr()
    for _ in range(10):
        model.to("cpu")
        torch.cuda.empty_cache()
        model.to(device)
        if model.weight.data_ptr() == address:
            return True
    return False


def test_memory_that_was_freed_and_allocated_again_is_noticed(device: torch.device) -> None:
    """A daemon would go on reading what it has mapped, at an address that looks the same."""
    torch.cuda.empty_cache()
    model = share_parameters(torch.nn.Linear(4096, 4096, bias=False, device=device))
    if not offloaded_to_the_same_address(model, device):
        pytest.skip("the driver gave the memory other addresses ten times")
    with pytest.raises(NotShareable, match="the memory under the parameters"):
        shared_module(model)
    share_parameters(model)
    assert shared_module(model) is not None


def test_memory_that_stays_is_not_taken_for_other_memory(device: torch.device) -> None:
    """Whatever else comes and goes on the device, and whatever thread asks, also one that has not used CUDA yet."""
    model = share_parameters(torch.nn.Linear(4096, 4096, bias=False, device=device))
    shared = shared_module(model)
    with torch.no_grad():
        model.weight.add_(torch.ones_like(model.weight))
    torch.cuda.empty_cache()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(shared_module, model).result() is shared
    assert shared_module(model) is shared


def refusal(segment: CudaIpcSegment, device: torch.device) -> ProtocolError:
    with pytest.raises(ProtocolError) as raised:
        CudaIpcMapping(segment, device)
    assert torch.ones(4, device=device).sum().item() == 4, "the context survives a refusal"
    return raised.value


def test_a_wrong_device_is_refused_naming_both(device: torch.device) -> None:
    """Matched by UUID, never by number."""
    with peer(exporter, 1 << 20) as trainer:
        segment = msgspec.structs.replace(described(trainer)[0][0], device_uuid="GPU-00000000-1111")
        error = refusal(segment, device)
    assert error.code is ErrorCode.WRONG_DEVICE
    assert "GPU-00000000-1111" in error.message
    assert device_uuid(device) in error.message


@pytest.mark.parametrize("handle", [bytes(64), bytes(range(64)), b"\xff" * 64])
def test_foreign_bytes_are_refused_as_a_handle(device: torch.device, handle: bytes) -> None:
    """64 bytes that no cudaIpcGetMemHandle wrote."""
    with peer(exporter, 1 << 20) as trainer:
        error = refusal(msgspec.structs.replace(described(trainer)[0][0], handle=handle), device)
    assert error.code is ErrorCode.MEMORY_UNAVAILABLE


def test_foreign_bytes_are_refused_as_an_event(device: torch.device) -> None:
    """The mapping that was made first is undone."""
    with peer(exporter, 1 << 20) as trainer:
        segment = described(trainer)[0][0]
        error = refusal(msgspec.structs.replace(segment, event_handle=bytes(range(64))), device)
        assert error.code is ErrorCode.MEMORY_UNAVAILABLE
        CudaIpcMapping(segment, device).close()


def test_more_bytes_than_the_allocation_has_are_refused(device: torch.device) -> None:
    """The driver knows how large the allocation is."""
    with peer(exporter, 1 << 20) as trainer:
        segment = described(trainer)[0][0]
        error = refusal(msgspec.structs.replace(segment, size_bytes=segment.size_bytes + 1), device)
    assert error.code is ErrorCode.MEMORY_UNAVAILABLE
    assert str(segment.size_bytes) in error.message


def test_the_process_own_handle_is_refused(device: torch.device) -> None:
    """CUDA cannot open a handle in the process that made it."""
    from refit_trainer.cuda_memory import CudaBackend

    own = torch.ones(1 << 22, device=device)
    error = refusal(CudaBackend().share([own]).segments[0], device)  # type: ignore[arg-type]
    assert error.code is ErrorCode.INVALID_DESCRIPTOR


def test_a_dead_trainers_handle_is_refused(device: torch.device) -> None:
    """Its memory went with it."""
    with peer(exporter, 1 << 20) as trainer:
        segment = described(trainer)[0][0]
        trainer.kill()
        error = refusal(segment, device)
    assert error.code is ErrorCode.MEMORY_UNAVAILABLE
    assert "is gone" in error.message


def test_a_trainer_that_dies_before_its_writes_are_done_does_not_hang_the_reader(device: torch.device) -> None:
    """The wait ends with a typed error or, where the driver lets the kernel finish, with the write done."""
    with peer(exporter, 1 << 20) as trainer:
        segments, places = described(trainer)
        mapping = CudaIpcMapping(segments[places[1][0]], device)
        trainer.ask(("write after", 2000, 9))
        trainer.kill()
        assert mapping.written is not None
        with suppress(ProtocolError):
            mapping.written.wait()
        assert mapping.data[:16].cpu().numel() == 16, "what is mapped stays readable until it is closed"
        mapping.close()
