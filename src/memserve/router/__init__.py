"""Which instance serves which request."""
