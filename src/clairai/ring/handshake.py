"""Takes a private folder; gives engines a place to offer their ring and readers the way to it."""

from clairai.ring.attach import Reader
from clairai.ring.folder import engines, runtime_dir
from clairai.ring.server import RingServer

__all__ = ["Reader", "RingServer", "engines", "runtime_dir"]
