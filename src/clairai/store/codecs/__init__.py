"""Encoders of residual rows, with their decoders; they need nothing but numpy.

The worker encodes on its device with the same arithmetic (`clairai.engine.capture`).
"""
