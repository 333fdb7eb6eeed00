"""Commands: flags in, one call out."""
