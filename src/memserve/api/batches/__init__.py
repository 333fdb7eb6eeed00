"""Files and batches: requests that are answered later, behind all others."""
