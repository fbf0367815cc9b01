"""Stage 1. Runs in the vLLM worker, inside the forward pass; takes residual rows, gives scores."""
