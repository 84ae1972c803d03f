from __future__ import annotations

from pathlib import Path

import pytest

from refit_protocol.endpoint import default_directory, default_endpoint, socket_path


@pytest.mark.parametrize(
    ("environment", "directory"),
    [
        ({"RUNTIME_DIRECTORY": "/run/refitd", "XDG_RUNTIME_DIR": "/run/user/5"}, "/run/refitd"),
        ({"RUNTIME_DIRECTORY": "/run/a:/run/b"}, "/run/a"),
        ({"XDG_RUNTIME_DIR": "/run/user/5"}, "/run/user/5/refitd"),
        ({}, "/tmp/refitd-5"),
    ],
)
def test_directory_both_sides_agree_on(environment: dict[str, str], directory: str) -> None:
    """systemd's, else the login's, else one of the user's own in /tmp: two users never share one."""
    assert default_directory(environment, 5) == Path(directory)
    assert default_endpoint(environment, 5) == f"ipc://{directory}/refitd.sock"


def test_environment_may_name_the_endpoint() -> None:
    assert default_endpoint({"REFITD_ENDPOINT": "ipc:///x/y"}, 5) == "ipc:///x/y"


def test_longest_possible_path() -> None:
    """107 bytes fit, counted in UTF-8; 108 and 200 do not, and the refusal names limit and path."""
    path = "/" + "x" * 106
    assert socket_path(f"ipc://{path}") == Path(path)
    for too_long in (path + "x", "/" + "x" * 199, "/" + "é" * 54):
        with pytest.raises(ValueError, match="at most 107") as refusal:
            socket_path(f"ipc://{too_long}")
        assert too_long in str(refusal.value) or repr(f"ipc://{too_long}") in str(refusal.value)


def test_other_transports_have_no_path() -> None:
    assert socket_path("tcp://127.0.0.1:5000") is None


def test_relative_path_is_refused() -> None:
    with pytest.raises(ValueError, match="absolute"):
        socket_path("ipc://run/refitd.sock")


@pytest.mark.parametrize("endpoint", ["foo", "/run/refitd/refitd.sock", "tcp://", "inproc://refitd", ""])
def test_what_is_no_endpoint_is_refused_with_what_one_looks_like(endpoint: str) -> None:
    """Nothing would ever answer there."""
    with pytest.raises(ValueError, match=r"neither ipc:///path/to/refitd\.sock nor tcp://host:port"):
        socket_path(endpoint)
