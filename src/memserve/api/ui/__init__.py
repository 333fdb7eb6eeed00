"""The dashboard: ``/ui``, and the snapshots behind it."""
