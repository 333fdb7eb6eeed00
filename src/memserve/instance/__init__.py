"""The instance machine (level 2): pool, index and step scheduler of one inference instance, without any IO."""
