"""Every route of the proxy: who may call it, what it may cost. Takes nothing; gives the table.

A route that is not here does not exist: the app is built from this table, and a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from clairai.stream.settings import Limits

Method = Literal["GET", "POST", "PUT", "DELETE"]
Body = Literal["none", "json", "probe", "vector", "manifest", "file"]


@dataclass(frozen=True)
class Route:
    """`path` as FastAPI writes it. One that changes something refuses other sites' pages."""

    method: Method
    path: str
    handler: str
    needs_key: bool = True
    body: Body = "none"
    changes: bool = False

    def body_limit(self, limits: Limits) -> int:
        """Bytes it reads at most; of a file none: it is passed on as it comes."""
        sizes = {
            "none": 0,
            "file": 0,
            "json": limits.body_bytes,
            "probe": limits.probe_bytes,
            "vector": limits.vector_bytes,
            "manifest": limits.manifest_bytes,
        }
        return sizes[self.body]


TABLE: Final = (
    Route("POST", "/v1/chat/completions", "chat", body="json", changes=True),
    Route("POST", "/v1/completions", "completions", body="json", changes=True),
    Route("GET", "/v1/runs/{run}", "resume"),
    Route("DELETE", "/v1/runs/{run}", "stop", changes=True),
    Route("POST", "/v1/runs/{run}/steering", "amend", body="json", changes=True),
    Route("GET", "/v1/models", "models"),
    Route("POST", "/tokenize", "tokenize", body="json", changes=True),
    Route("POST", "/detokenize", "detokenize", body="json", changes=True),
    Route("GET", "/v1/probes", "list_probes"),
    # A probe's name may hold slashes.
    Route("PUT", "/v1/probes/{name:path}", "put_probe", body="probe", changes=True),
    Route("DELETE", "/v1/probes/{name:path}", "remove_probe", changes=True),
    Route("GET", "/v1/steering", "get_steering"),
    Route("POST", "/v1/steering", "set_steering", body="json", changes=True),
    Route("GET", "/v1/steering/vectors", "list_vectors"),
    # So may a vector's.
    Route("GET", "/v1/steering/vectors/{name:path}", "get_vector"),
    Route("PUT", "/v1/steering/vectors/{name:path}", "put_vector", body="vector", changes=True),
    Route("DELETE", "/v1/steering/vectors/{name:path}", "remove_vector", changes=True),
    Route("GET", "/v1/captures", "list_captures"),
    Route("GET", "/v1/captures/{id}", "get_capture"),
    Route("GET", "/v1/weights", "get_weights"),
    Route("GET", "/v1/weights/tensors", "list_tensors"),
    Route("POST", "/v1/weights/check", "check_weights", body="manifest", changes=True),
    Route("POST", "/v1/weights/plan", "plan_weights", body="manifest", changes=True),
    Route("PUT", "/v1/weights/buffers/{transfer}/{index}", "put_buffer", body="file", changes=True),
    Route("POST", "/v1/weights/commit", "commit_weights", body="manifest", changes=True),
    Route("GET", "/v1/clairai", "describe"),
    Route("GET", "/v1/examples", "examples"),
    Route("GET", "/health", "health", needs_key=False),
    Route("GET", "/metrics", "metrics"),
    Route("GET", "/openapi.json", "openapi"),
    Route("GET", "/", "page", needs_key=False),
    Route("GET", "/assets/{path:path}", "asset", needs_key=False),
)
