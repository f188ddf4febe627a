"""What each test process needs from the start."""

import os
import signal

# tests run side by side, and threads that wait for each other spin
os.environ.setdefault("OMP_NUM_THREADS", "1")
# a shell that starts the tests in the background makes them ignore Ctrl-C, and all that they start
signal.signal(signal.SIGINT, signal.default_int_handler)
