"""Workloads: sessions of requests with their arrivals (level 1: pure, from a seed; files are read elsewhere)."""
