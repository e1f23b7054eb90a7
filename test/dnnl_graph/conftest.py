"""Set-up of the dnnl_graph tests."""

import os

# Two OpenMP threads on busy cores spend their time in barriers; one gives the same numbers. Set
# before the library is loaded, which fixes the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
