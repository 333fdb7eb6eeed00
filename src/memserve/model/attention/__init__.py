"""Paged attention behind transformers' attention interface: CPU kernels, Triton, torch reference."""
