"""StoreClient: values of a program's own in the store of a cluster, beside its KV.

    with StoreClient("127.0.0.1:7100", tenant="search", secret_file="secret") as client:
        client.put(b"page 7", embedding)                          # any contiguous buffer; True: the store has it
        with client.get(b"page 7") as view:                       # None: there is no such value
            vector = numpy.frombuffer(view.data, numpy.float32)   # in the store's memory, without a copy
        client.get_into([(b"page 7", buffer)])                    # or copied into a buffer of the caller's

On the store's host values are read where they lie, and nothing is asked of the store for those in its memory; from
another host they are copied through messages. Every call may be used from any thread, and ends by its deadline.

Several stores are as one; the death of one of these costs no value::

    with StoreClient("10.0.0.2:7100,10.0.0.3:7100", copies=2, secret_file="secret") as client:
        client.put(b"page 7", embedding)                          # in both of them; of three, in two
        client.get(b"page 7")                                     # of either, of one on this host first

``single`` has the calls of one store, ``joint`` those of several.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, cast

from memserve.store.client.joint import JointStoreClient
from memserve.store.client.single import SingleStoreClient

if TYPE_CHECKING:
    from typing import Self


class StoreClient(SingleStoreClient):
    """A client of one store, or of several as one. What is put under a tenant is found under that tenant alone.

    Calls, arguments and errors are those of :class:`SingleStoreClient`. Where ``address`` names several stores
    (``HOST:PORT,HOST:PORT``), each value lies in ``copies`` of them; what differs is said at
    :class:`~memserve.store.client.joint.JointStoreClient`:

    =================  ========================================================================
    ``close``          leaves all of them
    ``put``            True: one store, at least, has taken the value
    ``get``            of a store on this host before others; of the next in line where one is away
    ``purge``          counts each copy
    ``statistics``     of all stores that answer, added up
    ``is_mapped``      whether the memory of all stores that answer is mapped
    =================  ========================================================================
    """

    #: of ``__init__``, though what is made depends on the address
    __signature__ = inspect.signature(SingleStoreClient)

    def __new__(cls, address: str, *args: object, **options: object) -> Self:
        """A client of several stores, where several are named."""
        is_of_several = cls is StoreClient and isinstance(address, str) and "," in address
        return cast("Self", object.__new__(_ClientOfSeveral if is_of_several else cls))


class _ClientOfSeveral(JointStoreClient, StoreClient):
    """What ``StoreClient("A:7100,B:7100")`` is."""
