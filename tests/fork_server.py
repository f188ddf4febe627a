"""The server from which the tests fork all other Python processes.

Python has one fork server, and the module that starts it chooses what its children have imported.
fairseq's commands (``tests/end_to_end/commands.py``) and second workers (``tests/two_workers.py``)
share this one: it has imported fairseq and loaded the plugin, which takes seconds. A command that
loads the plugin from another path needs a new Python process.
"""

import multiprocessing
from multiprocessing import forkserver

COMMANDS = ("preprocess", "train", "eval_lm", "generate", "interactive")
# the slowest imports; every optimizer imports torch._dynamo
IMPORTED = [*(f"fairseq_cli.{name}" for name in COMMANDS), "torch._dynamo", "numba", "pytest"]
IMPORTED += ["tests.loaded_plugin"]

FORK_SERVER = multiprocessing.get_context("forkserver")
# the server's children import this file, too, and must not start another server
if forkserver.get_inherited_fds() is None:
    FORK_SERVER.set_forkserver_preload(IMPORTED)
    # start now: later it would inherit what a test changed, such as an environment variable
    forkserver.ensure_running()
