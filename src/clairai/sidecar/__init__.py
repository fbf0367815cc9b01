"""The command `clairai sidecar`: shows the scores of an engine as a live table or JSON lines.

Runs in: a reader beside vLLM, started before or after it. Needs no GPU and no vLLM.
"""
