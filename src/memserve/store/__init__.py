"""Values by 16-byte keys, in memory and on disks: the machines, their process, and the clients."""
