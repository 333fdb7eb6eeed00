"""What the scripts of ``bench/`` share, so that each of them says only what it compares.

=============== =====================================================================================================
``flags``       flags by their defaults, ``--json`` and ``--geometry``; the record of a run; folders for logs and disks
``rounds``      contenders in turns, round by round; medians, quartiles and ratios of rounds, percentiles
``tables``      rows as Markdown
``prompts``     tokens and texts that no cache has
``processes``   children, whatever they run: ready, asked by lines, measured by ``/proc``, ended
``clients``     requests, streamed and whole; closed loops
``scheduling``  a scheduler or an index alone: the same requests and prompts for several engines'
--------------- -----------------------------------------------------------------------------------------------------
``served``      ``memserve serve``, with a store and without
``engines``     vLLM's server, plain, with memserve's connector, with KV events; answers compared token by token
``routers``     routers without instances, and wrk in front of them
``disks``       a store's disks, driven from the script
``chats``       real chats of a data folder, and the answers of a reference to them
``chat_load``   made chats in turn, against one server or several
``tools``       the field's own load tools: installed, called, their figures
``contenders``  memserve, vLLM and llama.cpp with the same model
``gguf_files``  models as llama.cpp reads them
=============== =====================================================================================================

``tests/support`` comes on the path: doubles of servers, shapes of KV.
"""

import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1]
ROOT = BENCH.parent
SUPPORT = ROOT / "tests" / "support"
if str(SUPPORT) not in sys.path:
    sys.path.insert(0, str(SUPPORT))
