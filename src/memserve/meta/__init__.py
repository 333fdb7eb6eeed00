"""Keeps what the cluster must remember: records, their journal, and the state that they make."""
