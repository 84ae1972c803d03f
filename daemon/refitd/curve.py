"""Keys for TCP: made by `refitd keygen`, checked before the model loads, asked for at every handshake; and those of the
commands that look at such a daemon."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
import zmq.auth
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from refitd.endpoint import EndpointError

if TYPE_CHECKING:
    from refitd.config import ServerConfig

_KEY_BYTES = 32


def write_keys(directory: Path, name: str) -> tuple[Path, Path]:
    """A new pair, as `name.key` (public) and `name.key_secret`, mode 0600. Raises `EndpointError` where one exists."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    public, secret = directory / f"{name}.key", directory / f"{name}.key_secret"
    for path in (public, secret):
        if path.exists():
            raise EndpointError(f"{path} exists: keys are never overwritten, choose another name or move it away")
    before = os.umask(0o077)
    try:
        zmq.auth.create_certificates(directory, name)
    finally:
        os.umask(before)
    return public, secret


def check_keys(config: ServerConfig) -> None:
    """Raises `EndpointError` where the daemon's secret key or the list of clients cannot be used."""
    _server_keys(config)
    if config.curve_clients is None or not config.curve_clients.is_dir():
        raise EndpointError(f"server.curve_clients: {config.curve_clients} is not a directory of clients' public keys")
    for path in sorted(config.curve_clients.glob("*.key")):
        _load(path, "server.curve_clients")


def private_pair(path: Path, called: str) -> tuple[bytes, bytes]:
    """Public and secret key from a file that only its owner can read; errors name it as `called`.

    Raises `EndpointError`.
    """
    public, secret = _load(path, called)
    if secret is None:
        raise EndpointError(f"{called}: {path} holds no secret key (is it the public one?)")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise EndpointError(f"{called}: {path} can be read by others: chmod 600 it, or make new keys")
    return public, secret


def public_key(file_or_key: str, called: str) -> bytes:
    """From a file, or the 40 characters of Z85 themselves; errors name it as `called`. Raises `EndpointError`."""
    if _is_key(os.fsencode(file_or_key)) and not Path(file_or_key).exists():
        return os.fsencode(file_or_key)
    public, _ = _load(Path(file_or_key), called)
    return public


class CurveAccess:
    """Lets in over one socket whoever holds the secret to a key in `server.curve_clients`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: ServerConfig) -> None:
        self._config = config
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain="*", location=str(config.curve_clients))

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Before the bind."""
        socket.curve_publickey, socket.curve_secretkey = _server_keys(self._config)
        socket.curve_server = True

    def close(self) -> None:
        self._authenticator.stop()


def _server_keys(config: ServerConfig) -> tuple[bytes, bytes]:
    path = config.curve_secret_key
    if path is None:
        raise EndpointError("server.curve_secret_key is missing: tcp:// is served with CURVE only, see refitd keygen")
    return private_pair(path, "server.curve_secret_key")


def _load(path: Path, called: str) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except OSError:
        raise EndpointError(f"{called}: {path} holds no CURVE key: it is no file that can be read") from None
    except (ValueError, IndexError):
        raise EndpointError(f"{called}: {path} holds no CURVE key as refitd keygen writes it") from None
    if not all(_is_key(key) for key in (public, secret) if key is not None):
        raise EndpointError(f"{called}: {path} holds no CURVE key: one is 40 characters of Z85")
    return public, secret


def _is_key(text: bytes) -> bool:
    try:
        return len(z85.decode(text)) == _KEY_BYTES
    except (ValueError, KeyError, struct.error):
        return False
