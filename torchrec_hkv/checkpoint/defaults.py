"""Default limits of saves and loads."""

import os

#: Default memory limit of a save or a load on a rank, in bytes, on the host and on the GPU each.
BATCH_BYTES = 256 << 20


#: Default number of threads of a rank that write or read files: 8 on hosts with 16 cores or more.
THREADS = 8 if (os.cpu_count() or 1) >= 16 else 4
