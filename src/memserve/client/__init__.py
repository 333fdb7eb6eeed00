"""Clients of a store: programs that keep values of their own beside the cluster's KV."""
