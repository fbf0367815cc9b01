"""Every touch of vLLM's private names: one small function per fact, with the versions it holds for."""
