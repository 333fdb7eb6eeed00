"""Which sequence computes which tokens next, on which blocks."""
