"""Which rows are captured, for whom and where to. Imports neither torch nor vllm."""
