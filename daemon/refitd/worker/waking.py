"""Whether the device has room for what sleeps, asked before vLLM's allocator tries.

vLLM 0.26's cannot be asked again once it has failed half-way: it maps a second time what it mapped the first time.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from refit_protocol.errors import ErrorCode, ProtocolError

GIB = 1 << 30


def require_room(device: torch.device, tags: Collection[str] | None) -> None:
    """Raises `engine_error` unless what sleeps under `tags` (None: all of it) fits into the device's free memory."""
    if device.type != "cuda":
        return
    needed = _asleep_bytes(tags)
    # What PyTorch holds for nobody is as good as free, but only after it was given back.
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise ProtocolError(
            ErrorCode.ENGINE_ERROR,
            f"to wake up takes {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB of the device are free:"
            " free some, then ask again",
            needed_bytes=needed,
            free_bytes=free,
        )


def _asleep_bytes(tags: Collection[str] | None) -> int:
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    if allocator is None:
        return 0
    return sum(
        data.handle[1]
        for data in allocator.pointer_to_data.values()
        if data.is_asleep and (tags is None or data.tag in tags)
    )
