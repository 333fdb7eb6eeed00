"""Is a cluster correct, whatever goes wrong? Scenarios from seeds, faults, and referees that only watch.

A seed is a complete bug report: it decides the processes, the requests, and what goes wrong and when.

::

    scenario   what a seed decides              truth        what every request must get
    world      builds it, runs it               clients      conversations, and the referee of their answers
    faults     what goes wrong, and heals       checks       what must hold at the end
    network, data_port                          between the instances
    literal_device, literal_pages, truth_device inside: KV as numbers, whole and by layer, for others to read
    layered_scenario, store_scenario            what some scenarios have: KV by layer, a store
    members, instances, stores                  the nodes, with knobs for what goes wrong
    literal_disk, store_devices, store_memory   what a store keeps, byte by byte
    campaign   many seeds
"""
