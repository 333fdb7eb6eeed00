"""Studies: figures of papers, and of this project."""
