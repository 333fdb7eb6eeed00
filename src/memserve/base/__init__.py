"""Types, units, errors, options, state tables: what every room may use."""
