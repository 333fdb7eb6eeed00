"""One plug-in of each kind for memserve (docs/guides/PLUGINS.md)."""
