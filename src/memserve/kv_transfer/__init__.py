"""KV blocks between instances: offers, pulls, leases, barriers; memory at a peer."""
