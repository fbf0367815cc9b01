"""Brings captured rows from the engine to their consumers, and records what became of them.

Runs in the capture writer process; its client side, and all of it where there is no such process,
in the worker. Imports neither torch nor vllm.
"""
