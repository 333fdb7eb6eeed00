"""Devices and disks whose answers are right by construction."""
