"""One completion request on its way through the proxy: read, passed on, joined with its scores.

Runs in: the proxy, on the event loop.
"""
