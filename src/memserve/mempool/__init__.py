"""The memory of one instance: blocks, tiers, prefix index, eviction."""
