"""What runs in vLLM's worker, inside and around the forward pass, and in vLLM's engine core.

score/ reads the residual stream, publish/ brings rows and scores to the ring, steer/ changes the
stream, capture/ copies it; step.py describes a step for all of them.
"""
