"""Generated from protos/nvrx/v1 by `make protos`; do not edit."""
