"""A folder of captures at any address that fsspec knows, such as s3://bucket/captures.

What is read of a shard is fetched when it is asked for. An object store has no rename and no
append: a file is there whole or not at all, and a manifest is replaced by a longer one.
"""

from __future__ import annotations

import os
from typing import Any, Final, TypeGuard

from clairai.errors import StoreError, StoreStoppedError, missing_extra, quote
from clairai.store.core_folders import sort_core_names
from clairai.store.disk import ByteSource

MAX_URL: Final = 2048
PART_NBYTES: Final = 4 << 20


def is_address(path: str | os.PathLike[str]) -> TypeGuard[str]:
    """True for an address of fsspec; a folder of this machine is a path."""
    return isinstance(path, str) and "://" in path


class RemoteDisk:
    """The files at one address. Raises StoreError for an address that fsspec does not know."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise missing_extra("fsspec", "fsspec") from None
        if type(url) is not str or not 1 <= len(url) <= MAX_URL or not is_address(url):
            raise StoreError(f"{quote(url)} is no address; give one such as s3://bucket/captures")
        try:
            self._remote, self._root = url_to_fs(url)
            self._url = url
        except Exception as error:  # every filesystem library has exceptions of its own
            raise StoreError(f"fsspec cannot use this address, {describe(error)}") from None

    def names(self) -> list[str]:
        """Raises StoreStoppedError if the address cannot be listed."""
        try:
            self._remote.invalidate_cache(self._root)
            found = self._remote.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise _unreadable(error) from None
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def core_names(self) -> list[str]:
        return sort_core_names(self.names())

    def core_disk(self, name: str) -> RemoteDisk:
        return RemoteDisk(f"{self._url.rstrip('/')}/{name}")

    def nbytes(self, name: str) -> int:
        path = self._path(name)
        try:
            self._remote.invalidate_cache(path)
            return int(self._remote.info(path)["size"])
        except FileNotFoundError:
            raise
        except Exception as error:
            raise _unreadable(error) from None

    def inode(self, _name: str) -> int:
        """Objects have none. A manifest only grows, so its size tells it from a later one."""
        return 0

    def read(self, name: str) -> bytes:
        try:
            return bytes(self._remote.cat_file(self._path(name)))
        except FileNotFoundError:
            raise
        except Exception as error:
            raise _unreadable(error) from None

    def view(self, name: str) -> RemoteFile:
        return RemoteFile(self._remote, self._path(name), self.nbytes(name))

    def put(self, name: str, data: ByteSource, nbytes: int) -> None:
        """Store a file, in the place of one that has its name.

        Raises StoreStoppedError if the address refused it, or has another number of bytes then.
        """
        path = self._path(name)
        try:
            self._remote.makedirs(self._root, exist_ok=True)
            with self._remote.open(path, "wb") as file:
                for start in range(0, nbytes, PART_NBYTES):
                    file.write(data[start : min(start + PART_NBYTES, nbytes)])
            self._remote.invalidate_cache(path)
            size: Any = self._remote.info(path)["size"]
        except Exception as error:
            raise StoreStoppedError(f"{name} could not be sent, {describe(error)}") from None
        if int(size) != nbytes:
            raise StoreStoppedError(f"{name} has {size} bytes there and {nbytes} here; try again")

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


class RemoteFile:
    """The bytes of a file at an address, fetched when they are asked for."""

    def __init__(self, remote: Any, path: str, nbytes: int) -> None:
        self._remote, self._path, self._nbytes = remote, path, nbytes

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, part: slice) -> memoryview:
        first, end, _ = part.indices(self._nbytes)
        if first >= end:
            return memoryview(b"")
        try:
            data = self._remote.cat_file(self._path, start=first, end=end)
        except Exception as error:
            raise _unreadable(error) from None
        return memoryview(data)


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {quote(str(error), 200)}"


def _unreadable(error: Exception) -> StoreStoppedError:
    return StoreStoppedError(f"the address cannot be read, {describe(error)}")
