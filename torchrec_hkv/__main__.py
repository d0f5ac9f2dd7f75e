"""``python -m torchrec_hkv``: the command ``torchrec-hkv``."""

import sys

from torchrec_hkv.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
