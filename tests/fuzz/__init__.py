"""Random inputs for every parser: short in the test suite, long by `make fuzz`."""
