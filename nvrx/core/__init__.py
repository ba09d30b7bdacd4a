"""The pure core: which nodes train, in which cycle, and what each node is to do. Decides; does no I/O."""
