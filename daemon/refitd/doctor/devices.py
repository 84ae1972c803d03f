"""Which GPUs there are, by UUID: the name that daemon and trainer must agree on, whatever the order in each process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from refitd.doctor.finding import Finding, failed, passed, skipped, warned

# Less than this left on a device means that somebody else works there.
FREE_FRACTION_WARNED = 0.2


NOT_LOOKED = "there are NVIDIA devices, and no binding to ask them: pip install nvidia-ml-py"


@dataclass(frozen=True)
class Gpu:
    """A physical GPU; `mig_uuids` are its parts where it is divided."""

    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    mig_uuids: tuple[str, ...] = ()

    @property
    def uuids(self) -> tuple[str, ...]:
        return self.mig_uuids or (self.uuid,)


def read_gpus() -> list[Gpu]:
    """What the NVIDIA driver says, without starting CUDA; empty where there is no driver or no binding for it."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_read_gpu(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def can_look() -> bool:
    """Whether an empty `read_gpus` means that there is none."""
    return find_spec("pynvml") is not None or not any(Path("/dev").glob("nvidia[0-9]*"))


def visible_uuids(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[str]:
    """The UUIDs that CUDA_VISIBLE_DEVICES leaves, given as numbers, UUIDs or beginnings of them."""
    every = [uuid for gpu in gpus for uuid in gpu.uuids]
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return every
    visible: list[str] = []
    for entry in (part.strip() for part in wanted.split(",") if part.strip()):
        named = [every[int(entry)]] if entry.isdecimal() and int(entry) < len(every) else _begins(every, entry)
        if not named:
            return visible  # CUDA ignores what comes after the first entry it does not know
        visible += named
    return visible


def check_devices(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> Iterator[Finding]:
    if not gpus:
        yield passed("devices", "no NVIDIA device: CPU") if can_look() else skipped("devices", NOT_LOOKED)
        return
    visible = visible_uuids(gpus, environment)
    if not visible:
        wanted = environment.get("CUDA_VISIBLE_DEVICES")
        yield failed("devices", f"CUDA_VISIBLE_DEVICES={wanted!r} names none of this machine's", _known(gpus))
    for gpu in gpus:
        yield from _check_gpu(gpu, visible)


def check_same_devices(daemon: Sequence[str], gpus: Sequence[Gpu], environment: Mapping[str, str]) -> Iterator[Finding]:
    """From the trainer's side: CUDA memory is shared on one device only, be it called 0 here and 3 there."""
    on_gpu = [device for device in daemon if device.startswith(("GPU-", "MIG-"))]
    if not on_gpu:
        return
    if not can_look():
        yield skipped("same device", f"{NOT_LOOKED}; the daemon is on {', '.join(on_gpu)}")
        return
    mine = visible_uuids(gpus, environment)
    if common := sorted(set(on_gpu) & set(mine)):
        yield passed("same device", ", ".join(common))
        return
    yield failed(
        "same device",
        f"the daemon is on {', '.join(on_gpu)}, this process sees {', '.join(mine) or 'no GPU'}",
        f"start the trainer with CUDA_VISIBLE_DEVICES={','.join(on_gpu)}; several MIG parts share no memory",
    )


def _read_gpu(handle: object) -> Gpu:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        mig_uuids=tuple(_read_mig_uuids(handle)),
    )


def _read_mig_uuids(handle: object) -> Iterator[str]:
    import pynvml

    # Devices that cannot be divided, and slots that hold no part, answer with an error.
    with suppress(pynvml.NVMLError):
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with suppress(pynvml.NVMLError):
                yield _text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)))


def _check_gpu(gpu: Gpu, visible: Sequence[str]) -> Iterator[Finding]:
    if not set(gpu.uuids) & set(visible):
        return
    free, total = gpu.free_bytes / 2**30, gpu.total_bytes / 2**30
    text = f"{gpu.name} {gpu.uuid}, {free:.1f} of {total:.1f} GiB free"
    if gpu.mig_uuids:
        text += f", divided into {', '.join(gpu.mig_uuids)}"
    if gpu.free_bytes < FREE_FRACTION_WARNED * gpu.total_bytes:
        yield warned("devices", text, "nvidia-smi names who uses it; lower engine.gpu_memory_utilization or wait")
    else:
        yield passed("devices", text)


def _begins(every: Sequence[str], entry: str) -> list[str]:
    return [uuid for uuid in every if uuid.startswith(entry)]


def _known(gpus: Sequence[Gpu]) -> str:
    return f"known are: {', '.join(uuid for gpu in gpus for uuid in gpu.uuids)}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
