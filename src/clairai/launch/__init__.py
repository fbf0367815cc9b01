"""Starts vLLM with clairai configured, puts the proxy in front of it and restarts or ends both.

Runs in: the process of `clairai serve`, `clairai demo` or `clairai proxy`, and in the process
guard, a script between that process and vLLM's.
"""
