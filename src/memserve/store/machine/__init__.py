"""What a store keeps in memory and on disks, and for which client."""
