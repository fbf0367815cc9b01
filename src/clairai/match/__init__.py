"""The one place where a score meets its token, for offline scores, the proxy and stop rules.

Runs in: any reader, and the engine core.
"""
