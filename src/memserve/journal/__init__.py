"""What a router must not forget: records, their journal, and where it lies."""
