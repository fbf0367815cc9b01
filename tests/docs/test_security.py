"""The bounds in SECURITY.md are those of the code."""

from __future__ import annotations

from typing import Final

import pytest

from clairai.batch import prompts
from clairai.capture import pipe
from clairai.engine import used_streams
from clairai.engine.publish import step_publisher
from clairai.fields import capture, json_fields, row_growth, rules, steer
from clairai.fields import ranges as field_ranges
from clairai.launch import api_key, engine_log
from clairai.launch.engine_process import POLL_S
from clairai.local import c_extension
from clairai.match import row_collector
from clairai.probe import bank, file_format, files, numeric_bounds
from clairai.proxy import access_keys
from clairai.proxy.connections import NUM_RESERVED
from clairai.proxy.proxy_settings import Limits, Timeouts
from clairai.ring import server
from clairai.server import capture_download
from clairai.settings import SpoolSettings
from clairai.spool import server as spool_server
from clairai.spool import spool
from clairai.store import bundle, row_block
from clairai.weights import manifest, upload
from clairai.wire import ring_messages, weights_messages
from tests.shape.source import ROOT

PAGE: Final = (ROOT / "SECURITY.md").read_text()
MIB: Final = 1 << 20
LIMITS, TIMEOUTS, SPOOL = Limits(), Timeouts(), SpoolSettings()
# The row of the table, with its numbers from the code.
ROWS: Final = {
    "native probe file": (
        f"{files.MAX_PROBE_NBYTES // MIB} MiB, header {files.MAX_HEADER >> 10} KiB"
    ),
    "JSON probe file": f"{files.MAX_JSON_NBYTES // MIB} MiB",
    "probe files in one folder": f"{file_format.MAX_FILES}",
    "probes in a bank": f"{bank.MAX_PROBES};",
    "a request's fields, as text": (
        f"{json_fields.MAX_CHARS // MIB} Mi characters; {steer.MAX_ENTRIES}; {rules.MAX_RULES}"
    ),
    "the length of a vector's row": numeric_bounds.ROW_LENGTHS,
    "a bias, threshold or bound": (
        f"{numeric_bounds.MAX_NUMBER:g} in size; the same, and 0 or at least "
        f"{numeric_bounds.MIN_FACTOR:g}"
    ),
    "a steered row of the residual stream": (
        f"length {row_growth.WIDE_ROWS.longest:g}; {row_growth.FLOAT16_ROWS.longest:g} for"
    ),
    "stream ids that an engine remembers": (
        f"{used_streams.MAX_USED_STREAMS}; {used_streams.MAX_USED_STREAMS}"
    ),
    "a reader's message": (
        f"{server.MAX_REQUEST_BYTES >> 10} KiB; {ring_messages.MAX_MESSAGE_BYTES // MIB} MiB"
    ),
    "readers of one engine": f"{server.MAX_READERS}",
    "tags of a capture": (
        f"{row_block.MAX_TAGS_NBYTES} bytes; {capture.MAX_POINTS}, {field_ranges.MAX_RANGES} and "
        f"{capture.MAX_CONSUMERS}"
    ),
    "a file of captured rows over HTTP": f"{bundle.MAX_NBYTES >> 30} GiB; {bundle.MAX_ROWS:,}",
    "captures that are read over HTTP at once": (
        f"{capture_download.MAX_READERS}; {capture_download.HELD_NBYTES // MIB} MiB, and "
        f"{bundle.PART_NBYTES >> 10} KiB on its way to each; "
        f"{capture_download.IDLE_NBYTES // MIB} MiB"
    ),
    "a client that takes nothing of a capture": f"{capture_download.STALL_S:g} s",
    "a file of prompts": f"{prompts.MAX_NBYTES >> 30} GiB; {prompts.MAX_LINE_NBYTES // MIB} MiB",
    "a manifest of weights": (
        f"{manifest.MAX_MANIFEST_BYTES // MIB} MiB; {manifest.MAX_TENSORS}, {manifest.MAX_BUFFERS}"
    ),
    "an upload of weights": f"{upload.MAX_UPLOAD_HEADER_BYTES // MIB} MiB",
    "a key file; keys in it": (
        f"{api_key.MAX_FILE_BYTES >> 10} KiB; {access_keys.MAX_KEYS}; {api_key.MIN_LISTED} to "
        f"{api_key.MAX_LISTED} characters; {access_keys.MAX_NAME}"
    ),
    "scores that an offline engine keeps": (
        f"{SPOOL.memory_mib} MiB; {SPOOL.disk_gib} GiB; {spool.FREE_NBYTES >> 30} GiB, or a "
        f"{spool.FREE_PART}th of a smaller disk"
    ),
    "a message to the spool": (
        f"{spool_server.MAX_QUESTION_BYTES >> 10} KiB; {spool_server.MAX_CONNECTIONS}, each closed "
        f"after {spool_server.IDLE_S:g} s"
    ),
    "requests that an engine can name": (
        f"{step_publisher.MAX_STREAMS_KEPT}; {step_publisher.MAX_STREAMS_SPOOLED}"
    ),
    "streams and rows that": f"{row_collector.MAX_STREAMS} and {row_collector.MAX_ROWS:,}",
    "vLLM's log;": f"{engine_log.MAX_BYTES // MIB} MiB each, and what is written within {POLL_S} s",
    "a compiled library": (
        f"{c_extension.MAX_LIBRARY_BYTES // MIB} MiB; {c_extension.COMPILE_TIMEOUT_S:.0f} s"
    ),
    "a request's head at the proxy": (
        f"{LIMITS.header_bytes >> 10} KiB; {LIMITS.target_bytes >> 10} KiB; {LIMITS.headers}"
    ),
    "a head's time": (
        f"{TIMEOUTS.head:.0f} s; {TIMEOUTS.idle:.0f} s; {TIMEOUTS.body:.0f} s, and 1 s more for "
        f"every {LIMITS.body_rate >> 10} KiB"
    ),
    "connections of the proxy": f"{LIMITS.connections}, or half",
    "connections of the proxy; of one peer": f"{NUM_RESERVED} more may ask",
    "a JSON body at the proxy": (
        f"{LIMITS.body_bytes // MIB} MiB; {LIMITS.depth}; {LIMITS.items}; {LIMITS.values}; "
        f"{LIMITS.keys}"
    ),
    "bodies in the proxy at once": (
        f"{LIMITS.bodies_bytes // MIB} MiB; {LIMITS.client_bodies_bytes // MIB} MiB"
    ),
    "JSON that the proxy reads": (
        f"{LIMITS.json_rate // MIB} MiB, {LIMITS.json_burst // MIB} MiB at once; "
        f"{LIMITS.client_json_rate // MIB} MiB, {LIMITS.client_json_burst // MIB} MiB at once"
    ),
    "a form at the proxy": f"{LIMITS.form_bytes // MIB} MiB",
    "answers whose scores are kept": (
        f"{LIMITS.kept_answers}; {LIMITS.kept_bytes // MIB} MiB; {TIMEOUTS.scores_kept:g} s after"
    ),
    "requests in the proxy at once": (
        f"{LIMITS.streams}; {LIMITS.runs}; {LIMITS.run_bytes // MIB} MiB"
    ),
    "answers of a request with scores": f"{LIMITS.choices}",
    "a message to or from the capture writer": f"{pipe.MAX_NBYTES // MIB} MiB",
}


@pytest.mark.parametrize("row", ROWS)
def test_a_bound_is_as_stated(row: str) -> None:
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {row}"))
    assert ROWS[row] in line


def test_shared_buffers_are_bounded_as_stated() -> None:
    assert f"at most {weights_messages.MAX_SHARED_BYTES // MIB} MiB" in PAGE
