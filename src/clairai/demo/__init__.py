"""The demo: a small model from PyPI with probes and vectors trained for it.

Runs in: the process of `clairai demo`; the model itself runs in a vLLM that it starts.
"""
