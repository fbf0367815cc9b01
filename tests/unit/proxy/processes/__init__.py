"""Tests of the parts of a proxy with several processes."""
