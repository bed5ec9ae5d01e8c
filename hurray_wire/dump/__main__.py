"""`python -m hurray_wire.dump`."""

import sys

from hurray_wire.dump.cli import main

sys.exit(main())
