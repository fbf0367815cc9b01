"""Captures a file of prompts: `clairai capture run`.

Runs in the process of the command, which starts an engine of its own.
"""
