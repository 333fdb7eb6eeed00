"""Everything that crosses the border of a process."""
