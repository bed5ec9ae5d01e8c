"""A Redis server of the tests' own on loopback, and what they do to it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def redis_server(*options: str) -> Iterator[int]:
    """A server for as long as the context lasts; its port. Skips the test where there is none to start."""
    redis = pytest.importorskip("redis", reason="needs the redis package")
    command = shutil.which("redis-server") or shutil.which("valkey-server")
    if command is None:
        pytest.skip("needs redis-server (Debian: apt-get install redis-server)")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        words = [command, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        process = subprocess.Popen([*words, "--dir", folder, *options], stdout=subprocess.DEVNULL)
        try:
            wait_for(redis, port, process)
            yield port
        finally:
            process.kill()
            process.wait()


def wait_for(redis: Any, port: int, process: subprocess.Popen[bytes]) -> None:
    """Until the server answers."""
    for _ in range(200):
        assert process.poll() is None, "the server ended"
        try:
            with redis.Redis(port=port) as client:
                client.ping()
                return
        except redis.exceptions.ConnectionError:
            time.sleep(0.05)
    pytest.fail("the server does not answer")


def module_port() -> Iterator[int]:
    """A fixture: the port of a server that a module's tests share."""
    with redis_server() as port:
        yield port


def fresh_client(port: int) -> Iterator[Any]:
    """A fixture: a client of that server, which has been emptied."""
    import redis

    with redis.Redis(port=port) as client:
        client.flushall()
        yield client
