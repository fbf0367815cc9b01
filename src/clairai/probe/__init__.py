"""Linear probes: the checked model of one, the bank an engine holds, and their files.

Used in every process that knows probes; imports neither torch nor vllm.
"""
