"""One thread a test process: tests run side by side, and threads that wait for each other spin."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
