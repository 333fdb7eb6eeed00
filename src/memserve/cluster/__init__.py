"""The cluster's brain: who is a member, what each has cached, who runs which request, and what happens when one dies."""
