"""torch's TCPStore protocol: codec and state without I/O, and a client without torch."""
