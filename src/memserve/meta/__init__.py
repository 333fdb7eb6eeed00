"""What the cluster must remember, kept: records, their journal, and the state that they make."""
