"""The process that all other Python processes of the tests are forked from.

Python has one fork server, and who starts it says what its children have imported. fairseq's
commands (``tests/end_to_end/commands.py``) and second workers (``tests/two_workers.py``) both take
it from here: it has imported fairseq, which takes seconds, and not the plugin, which a command
loads from the path that it is given.
"""

import multiprocessing
from multiprocessing import forkserver

COMMANDS = ("preprocess", "train", "eval_lm", "generate", "interactive")

FORK_SERVER = multiprocessing.get_context("forkserver")
# its children import this file, too
if forkserver.get_inherited_fds() is None:
    FORK_SERVER.set_forkserver_preload(["pytest", *(f"fairseq_cli.{name}" for name in COMMANDS)])
    # now: later it would keep what a test changed, such as a variable of the environment
    forkserver.ensure_running()
