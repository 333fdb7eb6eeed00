"""Values by 16-byte keys, in memory and on disks: machines without IO."""
