"""The cluster's brain: its members, what each has cached, who runs which request, and what happens when one dies."""
