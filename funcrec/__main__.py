"""python -m funcrec: commands, of which `plan` is one."""

import sys

from funcrec.planner import main

if __name__ == "__main__":
    sys.exit(main())
