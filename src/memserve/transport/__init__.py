"""Messages and pages between processes."""
