"""Trains a DLRM on Criteo's click log, with hash tables for the large columns.

    torchrun --nproc_per_node 2 examples/train_dlrm.py --data train.txt --limit 1000000

Criteo's text files are read as they are published, and arrays (.npz). Nothing is known of the ids
ahead: columns with more than 1,000 distinct values go to hash tables, which take the hashes as they
are. The first 80 % of the rows are trained on, the last 20 % are the test.
"""

from __future__ import annotations

import sys

from click_example import main
from launch import run

if __name__ == "__main__":
    sys.exit(run(lambda: main(__doc__, architecture="dlrm")))
