"""What Python users call: configuration, scores, captures, and the banks of a running engine.

Runs in: the user's process, with vLLM's `LLM` or beside it; the API server uses a part.
"""
