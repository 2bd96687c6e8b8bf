"""Settings for the whole suite."""

import os

# Before torch is imported, and for the servers that tests start: tiny models gain nothing from threads,
# and tests that run side by side lose a lot to them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
