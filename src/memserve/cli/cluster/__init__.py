"""Commands that start a cluster, or a part of one."""
