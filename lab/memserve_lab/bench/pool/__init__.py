"""``memserve bench pool``: MemPool's calls, its index and its block aggregation (MemServe figures 9, 10, 11)."""
