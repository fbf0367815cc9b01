"""Selects the rows that requests ask for, encodes them on the device and copies them to the host.

Runs in the worker; capture plans are resolved in the engine core.
"""
