"""The one place that touches vLLM: wherever a private name of vLLM is used, it is used here.

Runs in: the vLLM processes of an engine that asks for clairai (API server, engine core, workers).
Each module's docstring names the vLLM files and lines it relies on, in the oldest and the newest
release that is served.
"""
