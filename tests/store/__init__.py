"""Conformance of a TCPStore server: the same tests on torch's own and on ours. Knows nothing of how ours is made."""
