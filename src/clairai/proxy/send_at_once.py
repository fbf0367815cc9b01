"""Has a connection send what is written to it at once.

Runs in: the proxy, on the event loop.
"""

from __future__ import annotations

import asyncio


def send_at_once(transport: asyncio.Transport) -> None:
    """Send what is written now, and not when this round of the event loop is over.

    uvloop up to 0.22 (handles/stream.pyx `_initiate_write`) sends at the end of a round whatever
    does not reach the high-water mark. Of many requests that come in one round the first would then
    reach the engine after the last was read, and of many tokens the first would wait for the last.
    Whatever the other side does not take yet pauses the protocol, as ever.
    """
    transport.set_write_buffer_limits(high=0)
