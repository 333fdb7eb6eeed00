"""Engines that are members of a model's cluster, beside its instances."""
