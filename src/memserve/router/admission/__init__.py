"""Which requests may run: queues, ledgers, and those of other routers."""
