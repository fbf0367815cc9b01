"""The OpenAI proxy: passes requests on to vLLM and adds scores, named events, metrics and the page.

Runs in: a process of its own, or the one of `clairai serve`. Needs no GPU and no vLLM.
"""
