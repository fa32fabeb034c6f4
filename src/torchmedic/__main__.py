"""`python -m torchmedic`, and so `torchrun ... -m torchmedic run train.py`."""

import sys

from torchmedic.cli import main

if __name__ == "__main__":
    sys.exit(main())
