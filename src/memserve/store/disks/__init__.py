"""A store's disks: what is kept on them, decided without IO."""
