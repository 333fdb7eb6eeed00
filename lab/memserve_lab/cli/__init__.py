"""Commands of the lab, which memserve finds by entry points."""
