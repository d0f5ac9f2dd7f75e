"""``python -m torchrec_hkv.cli``, for environments without the installed command."""

import sys

from torchrec_hkv.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
