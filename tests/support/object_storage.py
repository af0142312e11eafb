"""A server in this process that speaks the protocol of S3, for this process and those that it starts."""

import contextlib
import logging
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from moto.server import ThreadedMotoServer

BUCKET = "bucket"


class ObjectStorage:
    """Objects in memory, which stay while the server is stopped."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server: ThreadedMotoServer | None = None
        self.port = 0
        self.start()

    def stop(self) -> None:
        """Refuse connections from now on."""
        if self._server is not None:
            self._server.stop()
            assert self._server._server is not None
            self._server._server.server_close()
            self._server = None

    def start(self) -> None:
        """Accept connections again."""
        if self._server is None:
            self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
            self._server.start()
            _, self.port = self._server.get_host_and_port()


@contextlib.contextmanager
def object_storage() -> Iterator[ObjectStorage]:
    """A server with an empty bucket of the name `BUCKET`, which is what ``s3://`` means meanwhile."""
    server = ObjectStorage()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.port}")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/moto-api/reset", data=b"").close()
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(BUCKET)
        try:
            yield server
        finally:
            server.stop()
            fsspec.get_filesystem_class("s3").clear_instance_cache()


def files_at(url: str) -> dict[str, list[str]]:
    """The files at a URL, by folder, without the name of the run that saves there."""
    files, root = fsspec.core.url_to_fs(url)
    files.invalidate_cache()
    found: dict[str, list[str]] = {}
    for path in map(Path, files.find(root)):
        if path.name == "owner.txt":
            continue
        found.setdefault(path.parent.name, []).append(path.name)
    return found
