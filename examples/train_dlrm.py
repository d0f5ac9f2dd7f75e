"""Trains a DLRM on Criteo's click log, with hash tables for the large columns.

    torchrun --nproc_per_node 2 examples/train_dlrm.py --data train.txt --limit 1000000

Reads Criteo's text files as published, and arrays (.npz). Columns with more than 1,000 distinct
values are in hash tables, which use the raw ids and need not know them in advance. The model is
trained on the first 80 % of the rows, and tested on the last 20 %.
"""

from __future__ import annotations

import sys

from click_example import main
from launch import run

if __name__ == "__main__":
    sys.exit(run(lambda: main(__doc__, architecture="dlrm")))
