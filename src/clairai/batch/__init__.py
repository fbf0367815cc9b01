"""Many prompts through one engine, their rows into one folder."""
