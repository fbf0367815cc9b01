"""Takes steering vectors and requests that name them; gives courses: what acts on which token."""
