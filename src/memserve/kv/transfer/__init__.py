"""KV between processes: offered, pulled, compared, handed over."""
