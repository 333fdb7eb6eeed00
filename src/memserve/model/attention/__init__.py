"""Paged attention behind transformers' attention interface (level 3): CPU kernels, Triton, torch reference."""
