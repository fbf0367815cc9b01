"""The embedded default: a small model from PyPI, and probes trained for it."""
