"""Default limits of saves and loads."""

#: Default memory limit of a save or a load on a rank, in bytes, on the host and on the GPU each.
BATCH_BYTES = 96 << 20


#: Default number of threads of a rank that write or read files.
THREADS = 4
