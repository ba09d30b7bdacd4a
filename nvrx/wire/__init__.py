"""proto <-> core, both ways: the only package that knows both. Decides nothing."""
