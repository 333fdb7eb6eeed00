"""Which instances, stores and routers there are, how busy they are, how many there should be."""
