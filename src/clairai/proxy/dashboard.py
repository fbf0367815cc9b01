"""Serves the built dashboard: the files that its folder had at the start, and nothing else."""

from __future__ import annotations

import mimetypes
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final

from starlette.responses import Response

from clairai.proxy.responses import HttpRefusal

CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "font-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
INDEX: Final = "index.html"


@dataclass(frozen=True)
class Dashboard:
    """The files of the built page, by their path; a client's path is looked up, never opened."""

    files: dict[str, tuple[bytes, str]]

    @classmethod
    def read(cls, folder: Path) -> Dashboard:
        found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return cls(
            {
                path.relative_to(folder).as_posix(): (path.read_bytes(), _media_type(path))
                for path in found
            }
        )

    def page(self) -> Response:
        return self._respond(INDEX, "no-cache")

    def asset(self, path: str) -> Response:
        # The names of built files contain a hash of their content.
        return self._respond(f"assets/{path}", "public, max-age=31536000, immutable")

    def _respond(self, name: str, caching: str) -> Response:
        if name not in self.files:
            raise HttpRefusal(HTTPStatus.NOT_FOUND, "the dashboard has no such file")
        body, kind = self.files[name]
        return Response(
            body,
            headers={
                "Content-Type": kind,
                "Content-Security-Policy": CONTENT_SECURITY_POLICY,
                "Cache-Control": caching,
            },
        )


def _media_type(path: Path) -> str:
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
