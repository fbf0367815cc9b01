"""How long a thread may keep Python's lock while another thread of its process wants it.

Runs in: vLLM's API servers and the processes of the proxy.
"""

from __future__ import annotations

import sys
from typing import Final

# With Python's own 5 ms, a thread beside a busy event loop waits 5 ms each time it wants the lock,
# and so does the loop beside a busy thread. vLLM (0.32 renderers/base.py, `_executor`) renders
# chats and tokenizes in one thread, which gives the lock up in between: while tokens are written,
# new requests would begin one by one, 10 ms or more apart. In the proxy one client's large bodies,
# which are read in a thread, would delay everybody else's answers.
SWITCH_S: Final = 5e-4


def switch_threads_often() -> None:
    sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
