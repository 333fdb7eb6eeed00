"""Whole clusters under virtual time: the production machines, unchanged, in a world that a seed decides.

``clock``, ``network``, ``process`` and ``nodes`` host machines; their ``Host`` says what they need of a world. On top
of them: ``fuzz`` (is the cluster correct, whatever goes wrong?), and the modules that ask how fast it would be.
"""
