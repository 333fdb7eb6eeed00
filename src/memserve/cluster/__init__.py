"""The router's machine: members, what each has cached, which of them runs a request, and what happens when one dies."""
