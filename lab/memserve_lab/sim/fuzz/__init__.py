"""Is a cluster correct, whatever goes wrong? Scenarios from seeds, faults, and referees that only watch.

A seed is a complete bug report: it decides the processes, the requests, and what goes wrong and when.

::

    scenario, scenario_features   what a seed decides: KV by layer, a store, sequences that instances share
    world                         builds it, runs it, and has every event checked
    clients, keyed                conversations, and the checker of their answers; clients that ask again
    faults                        what goes wrong, and heals
    network                       between the nodes
    instances, routers, stores    the nodes, with switches for what goes wrong
    checks, admission_judge       what must hold at the end, and of admission at every event
    plants                        safeguards that are taken out, to see that a checker notices
    campaign                      many seeds

What devices and disks hold is in ``sim/reference``: KV as numbers, byte by byte, and what every request must get.
"""
