"""The ring: shared memory in which the engine publishes every step, for any number of readers.

The writer runs in the worker and never waits; a reader in any process counts what it missed.
"""
