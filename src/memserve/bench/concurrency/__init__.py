"""``memserve bench concurrency``: bursts of requests, cold and warm, with and without admission limit (row C8)."""
