"""Publishes the rows and scores of every step to the ring.

Runs in the worker: the step publisher listens to the model runner, and the host or the GPU writes
the records.
"""
