"""Workloads on a cluster of production machines in virtual time."""
