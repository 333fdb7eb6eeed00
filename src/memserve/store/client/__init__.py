"""Clients of a store: programs that keep values of their own beside the KV of a cluster."""
