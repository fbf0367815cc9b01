"""What clairai adds to vLLM's API server: routes under /v1, and fields of requests and responses.

Runs in: vLLM's API server, as an endpoint plugin. It reaches the engine core and the workers only
through vLLM's `collective_rpc`.
"""
