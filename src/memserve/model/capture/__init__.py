"""Captured forwards (level 3): a module recorded as a graph, rewritten, and run as fused operations."""
