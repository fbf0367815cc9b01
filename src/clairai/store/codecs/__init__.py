"""Takes rows of the residual stream; gives them small, and back. Needs nothing but numpy."""
