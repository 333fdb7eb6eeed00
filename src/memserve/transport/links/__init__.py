"""Ways to read the memory of a peer."""
