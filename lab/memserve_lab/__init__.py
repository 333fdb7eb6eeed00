"""The laboratory of memserve: measures, simulates and reproduces."""
