"""What the Makefile runs: each module is one target's work, started with `python -m scripts.x`."""
