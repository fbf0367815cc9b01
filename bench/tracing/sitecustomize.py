"""Python imports this at the start of every process whose PYTHONPATH has this folder."""

from bench import trace_stages

trace_stages.install()
