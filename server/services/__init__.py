"""The gRPC services: decode, submit, encode. No rules."""
