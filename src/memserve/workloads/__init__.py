"""Workloads: who asks what, when, and after which answer (level 1: pure, from a seed; files are read elsewhere)."""
