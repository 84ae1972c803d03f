"""TCP: only with CURVE, only for keys on the list; what is wrong with keys is said before the model loads."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
import zmq.auth

from refit_protocol.codec import decode_reply, encode_request
from refit_protocol.errors import ErrorCode
from refit_protocol.messages import Failed, GetStatus, Goodbye, Heartbeat, Hello, RequestHeader, Welcome
from refit_trainer import Daemon, DaemonUnreachable
from refit_trainer.link import CurveKeys, Link, LinkRefusedError
from refitd.config import Config, ConfigError, ServerConfig, load_config
from refitd.curve import check_keys, write_keys
from refitd.endpoint import EndpointError, take_endpoint
from refitd.server import Server
from refitd.sessions import Sessions


@pytest.fixture
def keys(tmp_path: Path) -> ServerConfig:
    """A daemon's key, and one client `friend` on its list; `stranger` has a key that is not."""
    write_keys(tmp_path / "server", "daemon")
    (tmp_path / "clients").mkdir()
    for name in ("friend", "stranger"):
        write_keys(tmp_path / name, name)
    (tmp_path / "friend" / "friend.key").rename(tmp_path / "clients" / "friend.key")
    return ServerConfig(curve_secret_key=tmp_path / "server" / "daemon.key_secret", curve_clients=tmp_path / "clients")


@contextmanager
def serving(config: ServerConfig) -> Iterator[str]:
    """A server on a free TCP port; its endpoint."""
    loop = asyncio.new_event_loop()
    started, stop = threading.Event(), asyncio.Event()
    endpoints: list[str] = []

    async def run() -> None:
        sessions = Sessions(config, 1, local=False)
        server = Server(
            config,
            sessions,
            instant={Hello: sessions.hello, Heartbeat: sessions.heartbeat, Goodbye: sessions.goodbye},
            lengthy={},
        )
        server.bind("tcp://127.0.0.1:*")
        endpoints.append(server._socket.get_string(zmq.LAST_ENDPOINT))
        started.set()
        await stop.wait()
        await sessions.close_all()
        server.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert started.wait(30)
        yield endpoints[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def curve_keys(config: ServerConfig, secret_file: Path) -> CurveKeys:
    assert config.curve_secret_key is not None
    server_public, _ = zmq.auth.load_certificate(config.curve_secret_key)
    public, secret = zmq.auth.load_certificate(secret_file)
    assert secret is not None
    return CurveKeys(server_public, public, secret)


async def say_hello(endpoint: str, keys: CurveKeys | None, pid: int | None = None) -> Welcome | Failed:
    """Over the client library's own link; raises `LinkRefusedError` or TimeoutError."""
    replies: asyncio.Queue[list[bytes]] = asyncio.Queue()
    context = zmq.Context()
    link = Link(context, endpoint, keys, replies.put_nowait)
    try:
        async with asyncio.timeout(20):
            await link.connected()
            hello = Hello(protocol_versions=[1], client="tcp", pid=pid)
            await link.send(encode_request(RequestHeader(id=1, body=hello)))
            body = decode_reply(await replies.get())[0].body
            assert isinstance(body, Welcome | Failed)
            return body
    finally:
        link.close()
        context.term()


def test_key_on_the_list_is_let_in(keys: ServerConfig, tmp_path: Path) -> None:
    with serving(keys) as endpoint:
        friend = curve_keys(keys, tmp_path / "friend" / "friend.key_secret")
        assert isinstance(asyncio.run(say_hello(endpoint, friend)), Welcome)


def test_client_library_connects_with_its_keys(keys: ServerConfig, tmp_path: Path) -> None:
    """And says what is wrong when the daemon does not know them."""
    with serving(keys) as endpoint:
        friend = curve_keys(keys, tmp_path / "friend" / "friend.key_secret")
        with Daemon.connect(endpoint, curve=friend) as daemon:
            assert daemon.welcome.protocol_version == 1
        with pytest.raises(DaemonUnreachable, match="handshake failed"):
            Daemon.connect(endpoint, curve=curve_keys(keys, tmp_path / "stranger" / "stranger.key_secret"))


def test_pid_means_nothing_over_tcp(keys: ServerConfig, tmp_path: Path) -> None:
    """A remote client must not have local processes watched, or their memory opened."""
    with serving(keys) as endpoint:
        friend = curve_keys(keys, tmp_path / "friend" / "friend.key_secret")
        refused = asyncio.run(say_hello(endpoint, friend, pid=1))
    assert isinstance(refused, Failed)
    assert refused.code is ErrorCode.PEER_NOT_ALLOWED


def test_key_that_is_not_on_the_list_is_refused(keys: ServerConfig, tmp_path: Path) -> None:
    with serving(keys) as endpoint, pytest.raises(LinkRefusedError):
        asyncio.run(say_hello(endpoint, curve_keys(keys, tmp_path / "stranger" / "stranger.key_secret")))


def test_client_without_keys_is_refused(keys: ServerConfig) -> None:
    """Nothing it sends reaches the server."""
    with (
        serving(keys) as endpoint,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
    ):
        socket.linger = 0
        with socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED) as monitor:
            socket.connect(endpoint)
            socket.send_multipart([b"", *encode_request(RequestHeader(id=1, body=GetStatus()))])
            assert monitor.poll(20_000)
            assert not socket.poll(0)
            socket.disable_monitor()


def test_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    public, secret = write_keys(tmp_path / "new", "me")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert zmq.auth.load_certificate(public)[1] is None
    before = secret.read_bytes()
    with pytest.raises(EndpointError, match="never overwritten"):
        write_keys(tmp_path / "new", "me")
    assert secret.read_bytes() == before


def test_unusable_keys_are_named(keys: ServerConfig, tmp_path: Path) -> None:
    """Each in one line, before anything is bound."""
    secret = keys.curve_secret_key
    assert secret is not None
    public = secret.with_suffix(".key")
    wrong = {
        "no secret key": keys.model_copy(update={"curve_secret_key": public}),
        "holds no CURVE key": keys.model_copy(update={"curve_secret_key": tmp_path / "missing"}),
        "not a directory": keys.model_copy(update={"curve_clients": secret}),
    }
    for reason, config in wrong.items():
        with pytest.raises(EndpointError, match=reason):
            check_keys(config)
    check_keys(keys)
    secret.chmod(0o644)
    with pytest.raises(EndpointError, match="read by others"):
        check_keys(keys)


def test_tcp_without_keys_is_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"tcp:// needs server\.curve_secret_key and server\.curve_clients"
    ) as refusal:
        load_config({"model": "m", "endpoint": "tcp://127.0.0.1:5555"}, None)
    assert "\n" not in str(refusal.value)


def test_tcp_with_keys_needs_no_directory(keys: ServerConfig) -> None:
    take_endpoint(Config(model="m", endpoint="tcp://127.0.0.1:5555", server=keys)).release()


def test_keygen_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "refitd", "keygen", str(tmp_path / "k"), "--name", "trainer"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert str(tmp_path / "k" / "trainer.key_secret") in made.stdout
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 2
    assert len(again.stderr.strip().splitlines()) == 1
