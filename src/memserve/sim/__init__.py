"""Whole clusters under virtual time: the production machines, unchanged, in a world that a seed decides.

``clock``, ``network``, ``process`` and ``nodes`` host machines; ``host`` says what they need of a world. On them stands
``fuzz`` (is it right, whatever goes wrong?), and those that ask how fast it would be.
"""
