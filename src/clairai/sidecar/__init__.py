"""Runs beside vLLM, before or after it starts; takes its ring, gives a live table or JSON lines."""
