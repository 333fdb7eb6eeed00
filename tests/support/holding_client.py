"""A client that holds twelve values of a store until it ends: ``python holding_client.py ADDRESS SECRET_FILE``."""

import signal
import sys
from pathlib import Path

from memserve import StoreClient

if __name__ == "__main__":
    client = StoreClient(sys.argv[1], "victim", Path(sys.argv[2]))
    views = []
    for at in range(12):
        client.put(b"%d" % at, bytes([at]) * 1_000_000)
        views.append(client.get(b"%d" % at))
    print(*(bytes(view)[0] for view in views), flush=True)
    signal.pause()
