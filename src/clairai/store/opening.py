"""Takes an entry of the manifest; gives the file it names, opened and checked."""

from __future__ import annotations

from clairai.store import npz, shard
from clairai.store.disk import Disk
from clairai.store.manifest import Entry
from clairai.store.shard import Opened, damaged


def opened(disk: Disk, entry: Entry) -> Opened:
    """Its start is checked; StoreDamagedError if it is not what was committed."""
    try:
        data = disk.view(entry.name)
    except OSError as error:
        raise damaged(entry.name, f"it cannot be read ({error.strerror})") from None
    if entry.name.endswith(".npz"):
        found = npz.opened(entry.name, data, digest=entry.head_digest, nbytes=entry.nbytes)
    else:
        found = shard.opened(
            entry.name,
            data,
            head_nbytes=entry.head_nbytes,
            start_digest=entry.head_digest,
            nbytes=entry.nbytes,
        )
    head = found.head
    if (head.rows, head.origin, head.points) != (entry.rows, entry.origin, entry.points):
        raise damaged(entry.name, "it is not what the manifest says")
    return found
