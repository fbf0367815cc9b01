"""The clairai fields of a request, parsed and checked: scores, steering, stop rules and captures.

Runs in: the caller's process, the proxy, the API server and the engine core, which trusts none of
the others; imports neither torch nor vllm.
"""
