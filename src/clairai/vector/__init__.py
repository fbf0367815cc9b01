"""Steering vectors: the checked `Vector`, its files, and how to make one from contrasting texts.

Runs in: any process; imports neither torch nor vllm.
"""
