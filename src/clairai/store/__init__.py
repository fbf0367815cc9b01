"""Captured rows on disk: encoded, sealed, found again. Imports neither torch nor vllm."""
