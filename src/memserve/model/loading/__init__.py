"""From a name, folder or file to a model that is known to work here."""
