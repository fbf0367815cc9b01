"""A plugin of a test, which vLLM finds by an entry point in every process of an engine."""

from __future__ import annotations

import sys
from pathlib import Path


class InstalledPlugin:
    """Called in the engine's process before it starts: the plugin is found there and below."""

    def __init__(self, path: Path, entry: str) -> None:
        """`entry` is an entry_points.txt; `path` is an empty folder."""
        about = path / "clairai_tests_plugin-1.dist-info"
        about.mkdir()
        name = "Metadata-Version: 2.1\nName: clairai-tests-plugin\nVersion: 1\n"
        (about / "METADATA").write_text(name)
        (about / "entry_points.txt").write_text(entry)
        self.path = path

    def __call__(self) -> None:
        sys.path.append(str(self.path))
