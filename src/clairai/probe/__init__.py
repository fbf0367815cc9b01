"""Probes on disk and in memory: read, check, write. Imports neither torch nor vllm."""
