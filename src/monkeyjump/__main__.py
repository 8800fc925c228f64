"""`python -m monkeyjump`, the same as the command `monkeyjump`."""

import sys

from monkeyjump.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
