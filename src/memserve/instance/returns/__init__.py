"""Sessions between two turns: when they come back, and whose KV is kept for them."""
