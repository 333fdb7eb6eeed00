"""What connects processes: messages over ZeroMQ, pages over shared memory, the same channel, or NIXL.

::

    mailbox = ZmqMailbox(me, secret, host, port, on_message)     # links/mailbox.py, a runtime.ports.Mailbox
    port = open_data_port(link, geometry, arenas, on_pages, where)  # links/data.py, a runtime.ports.DataPort

- ``link`` is one of ``types.LINKS``: ``"auto"`` is shared memory to peers on the same host, and the
  cluster's encrypted channel to the others.
- ``arenas`` maps each tier that has blocks to its ``_core.SharedArena`` (anything with ``address``, ``nbytes`` and
  ``fd``; ``generation`` is set by ``describe``).
- ``port.describe(info)`` fills in host id, process, arenas and NIXL agent; ``mailbox.address`` goes into the info.
- ``Peer(name, 0)`` as a *receiver* means the bearer of the name now: that is how an instance says ``Join`` to a router
  whose generation it cannot know (``mailbox.connect(Peer(ROUTER, 0), address)``); the ``JoinAccepted`` comes from the
  router's true ``Peer``, which is then connected to under that.
- ``mailbox.become(me)`` is for a process that joins again as a new generation.
- A message to a peer that is not connected, but was heard from, still leaves (one attempt, at most one a second and
  peer): that is how an expelled peer is told so, and how a ``Join`` is answered before anybody has connected.
"""
