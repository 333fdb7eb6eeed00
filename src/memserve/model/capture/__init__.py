"""Captured forwards: a module recorded as a graph, rewritten, and run as fused operations."""
