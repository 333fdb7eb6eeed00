"""Workloads: sessions of requests with their arrivals (pure, from a seed; files are read elsewhere)."""
