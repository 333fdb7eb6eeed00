"""A router that is not the owner: a member of the owner's cluster that places requests."""
