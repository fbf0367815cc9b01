"""Train linear probes, and make steering vectors, from labelled texts.

Rows are read from a vLLM engine in this process through clairai's own taps; scikit-learn fits.
"""
