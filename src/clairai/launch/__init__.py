"""Starts vLLM with clairai configured, waits until it serves, and leaves nothing behind."""
