"""Scores residual rows with the bank's probes, inside the forward pass.

Runs in the worker: tables that keep their addresses, and the kernels that read them.
"""
