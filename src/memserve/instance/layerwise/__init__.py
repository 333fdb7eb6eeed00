"""KV by layer: which layers of a sequence lie where."""
