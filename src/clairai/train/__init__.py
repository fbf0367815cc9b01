"""Labelled texts to a linear probe: rows through our own taps, the fit with scikit-learn."""
