"""The same on GPUs: arenas, streams, graphs, sampling."""
