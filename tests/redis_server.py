"""A Redis or Valkey server for tests, as a process without a network port."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from dashinfer_vlm_core.installation import install_step
from tests.waiting import until

redis = pytest.importorskip("redis", reason=f"redis-py is not installed. {install_step('server')}")

PROGRAM = next(filter(None, map(shutil.which, ("valkey-server", "redis-server"))), None)


class RedisServer:
    """A server process that stores nothing on disk. Skips the test if no server is installed.

    Attributes:
        url: the URL of its database, for redis-py.
        client: a client for the test.
    """

    def __init__(self, folder):
        if PROGRAM is None:
            pytest.skip("there is no server: apt-get install redis-server, or valkey-server")
        self._socket = folder / "redis.sock"
        self._command = [PROGRAM, "--port", "0", "--unixsocket", str(self._socket), "--save", "", "--dir", str(folder)]
        self.url = f"unix://{self._socket}?db=0"
        self.client = redis.Redis.from_url(self.url)
        self.start()

    @property
    def store_url(self):
        """The URL for the option `embedding_store`."""
        return f"redis+{self.url}"

    def start(self):
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        until(lambda: self._responds() or self._process.poll() is not None)
        assert self._process.poll() is None, " ".join(self._command)

    def _responds(self):
        try:
            return self.client.ping()
        except redis.ConnectionError:
            return False

    def pause(self, seconds):
        """Let the server respond to nobody for some time; `kill` ends that."""
        self.client.execute_command("CLIENT", "PAUSE", int(1000 * seconds))

    def kill(self):
        self._process.kill()
        self._process.wait()

    def close(self):
        self.kill()
        self.client.close()
