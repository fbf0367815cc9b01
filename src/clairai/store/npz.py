"""Takes blocks of one request at one point; gives the bytes of one .npz file, and back.

The same arrays as in a shard, and `clairai`: the bytes of the JSON of its `Head`. Numpy alone reads
it. It is checked whole: its one checksum is in the manifest.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from clairai.store.rows import DTYPES, Block, Note
from clairai.store.shard import Head, Opened, Sealed, Tensor, check, damaged, parts

HEAD: Final = "clairai"


def seal(blocks: Sequence[Block], notes: Mapping[int, Note]) -> Sealed:
    head, tensors = parts(blocks, notes)
    arrays: dict[str, Any] = {name: np.concatenate(found) for name, found in tensors.items()}
    arrays[HEAD] = np.frombuffer(msgspec.json.encode(head), np.uint8)
    target = io.BytesIO()
    np.savez(target, **arrays)
    data = target.getvalue()
    return Sealed(data, (), len(data), head)


def opened(name: str, data: memoryview, *, digest: str, nbytes: int) -> Opened:
    """As `shard.opened`, for the other kind of file."""
    if len(data) != nbytes or hashlib.sha256(data).hexdigest() != digest:
        raise damaged(name, "its checksum is wrong")
    try:
        arrays = _arrays(bytes(data))
        head = msgspec.json.decode(arrays.pop(HEAD).tobytes(), type=Head)
    except (zipfile.BadZipFile, msgspec.DecodeError, KeyError, ValueError, EOFError):
        raise damaged(name, "it says what we never write") from None
    tensors, pieces, offset = {}, [], 0
    for key, array in arrays.items():
        end = offset + array.nbytes
        tensors[key] = Tensor(DTYPES.get(array.dtype, ""), array.shape, (offset, end))
        pieces.append(array.tobytes())
        offset = end
    check(name, head, tensors, offset)
    return Opened(name, head, tensors, memoryview(b"".join(pieces)))


def _arrays(data: bytes) -> dict[str, NDArray[Any]]:
    found = {}
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        for info in file.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(data):
                raise ValueError("we store and do not compress")
            found[info.filename.removesuffix(".npy")] = npy.read_array(io.BytesIO(file.read(info)))
    return found
