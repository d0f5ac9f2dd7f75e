"""Trains a DeepFM on a click log, with hash tables for the open-ended columns.

    torchrun --nproc_per_node 2 examples/train_deepfm.py

A factorization machine and a deep network share the rows. The model is trained on the first 80 % of
the log's rows in time, and tested on the last 20 %.
"""

from __future__ import annotations

import sys

from click_example import main
from launch import run

if __name__ == "__main__":
    sys.exit(run(lambda: main(__doc__, architecture="deepfm")))
