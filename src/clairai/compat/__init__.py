"""Every touch of vLLM's private names: a small function per fact, with its versions."""
