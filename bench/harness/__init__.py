"""What the scripts of ``bench/`` share, so that each of them says only what it compares.

=============== =====================================================================================================
``options``     flags by their defaults, ``--json`` and ``--geometry``; the record of a run; folders for logs and disks
``rounds``      contenders in turns, round by round; medians, quartiles and ratios of rounds, percentiles
``tables``      rows as Markdown
``processes``   children, whatever they run: ready, asked by lines, measured by ``/proc``, ended
``served``      ``memserve serve`` and ``memserve store``
``engines``     vLLM's server, plain, with memserve's connector, with KV events
``clients``     requests, streamed and whole; closed loops
``prompts``     tokens and texts that no cache has
``chats``       real chats of a data folder, and the answers of a reference to them
``chat_load``   made chats in turn, against one server or several
=============== =====================================================================================================

Importing it puts ``tests/support`` on the path, where doubles of servers and shapes of KV are.
"""

import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1]
ROOT = BENCH.parent
SUPPORT = ROOT / "tests" / "support"
if str(SUPPORT) not in sys.path:
    sys.path.insert(0, str(SUPPORT))
