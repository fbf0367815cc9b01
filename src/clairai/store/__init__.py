"""A folder of captured rows: written in sealed shards, recovered after a crash, read and exported.

Written in the capture writer process, read anywhere; imports neither torch nor vllm.
"""
