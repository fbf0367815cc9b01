"""What several rooms need on one machine: private sockets, shared memory, compiled C, stop signals.

Used in every process; imports no torch and no vLLM.
"""
