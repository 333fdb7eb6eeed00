"""Is a cluster right, whatever goes wrong? Scenarios from seeds, faults, and referees that only watch.

A seed is a complete bug report: it decides which processes there are, what is asked, what goes wrong and when.

::

    scenario   what a seed decides              truth        what every request must get
    world      builds it, runs it               clients      conversations, and the referee of their answers
    faults     what goes wrong, and heals       checks       what must hold when all is over
    network, data_port, truth_device            between and inside the instances
    campaign   many seeds
"""
