"""Steering: from the entries of a request to changed rows of the residual stream.

The engine core resolves entries to a steering plan and keys the prefix cache by it, without torch;
the worker turns plans into programs and runs them inside the forward pass.
"""
