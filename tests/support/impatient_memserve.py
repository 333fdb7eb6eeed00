"""``memserve``, which waits for a store for two seconds instead of half a minute."""

import sys

from memserve.cli.cluster import members
from memserve.cli.main import run

if __name__ == "__main__":
    members.FIND_S = 2.0
    sys.exit(run(sys.argv[1:]))
