"""The instance machine: pool, index and step scheduler of one inference instance, without any IO."""
