"""Several routers of the same engines."""
