"""The process that all other Python processes of the tests are forked from.

Python has one fork server, and who starts it says what its children have imported. fairseq's
commands (``tests/end_to_end/commands.py``) and second workers (``tests/two_workers.py``) both take
it from here: it has imported fairseq and loaded the plugin, which takes seconds. A command that is
given another path of the plugin needs a Python of its own.
"""

import multiprocessing
from multiprocessing import forkserver

COMMANDS = ("preprocess", "train", "eval_lm", "generate", "interactive")
# what takes longest to import; each optimizer imports torch._dynamo
IMPORTED = [*(f"fairseq_cli.{name}" for name in COMMANDS), "torch._dynamo", "numba", "pytest"]
IMPORTED += ["tests.loaded_plugin"]

FORK_SERVER = multiprocessing.get_context("forkserver")
# its children import this file, too
if forkserver.get_inherited_fds() is None:
    FORK_SERVER.set_forkserver_preload(IMPORTED)
    # now: later it would keep what a test changed, such as a variable of the environment
    forkserver.ensure_running()
