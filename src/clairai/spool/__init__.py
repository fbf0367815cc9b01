"""Keeps the scores of an engine on disk until `clairai.scores` asks for them.

Runs in: a process of its own, started by the worker; the user's process reads the files.
"""
