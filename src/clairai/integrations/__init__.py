"""Adapters that hand the scores of answers to other libraries; docs/integrations.md.

Each needs its library: `clairai[langchain]`, `clairai[inspect]`. Runs in: the user's process.
"""
