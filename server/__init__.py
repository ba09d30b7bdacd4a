"""The coordinator: one engine that owns all runs, its journal, its gRPC services and its command line."""
