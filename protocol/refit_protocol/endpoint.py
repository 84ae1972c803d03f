"""Where a daemon listens: the private directory both sides agree on, and the limit of a socket path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# sockaddr_un.sun_path holds 108 bytes, the last of which is NUL: unix(7).
MAX_SOCKET_PATH_BYTES = 107
SOCKET_NAME = "refitd.sock"
ENDPOINT_VARIABLE = "REFITD_ENDPOINT"


def default_directory(environment: Mapping[str, str], uid: int) -> Path:
    """`$RUNTIME_DIRECTORY` under systemd, else `$XDG_RUNTIME_DIR/refitd`, else `/tmp/refitd-<uid>`."""
    if under_systemd := environment.get("RUNTIME_DIRECTORY"):
        return Path(under_systemd.split(":")[0])
    if of_the_login := environment.get("XDG_RUNTIME_DIR"):
        return Path(of_the_login) / "refitd"
    return Path(f"/tmp/refitd-{uid}")


def default_endpoint(environment: Mapping[str, str], uid: int) -> str:
    """`$REFITD_ENDPOINT` where it is set, else the socket in the default directory."""
    return environment.get(ENDPOINT_VARIABLE) or f"ipc://{default_directory(environment, uid) / SOCKET_NAME}"


def socket_path(endpoint: str) -> Path | None:
    """The path of an `ipc://` endpoint, None for a `tcp://` one; raises ValueError for others, and where no socket can
    have it."""
    transport, _, path = endpoint.partition("://")
    if transport == "tcp" and path:
        return None
    if transport != "ipc":
        raise ValueError(f"endpoint {endpoint!r} is neither ipc:///path/to/refitd.sock nor tcp://host:port")
    length = len(path.encode())
    if not path.startswith("/"):
        raise ValueError(f"endpoint {endpoint!r}: the socket path must be absolute")
    if length > MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"endpoint {endpoint!r}: path of {length} bytes, at most {MAX_SOCKET_PATH_BYTES} are possible")
    return Path(path)
