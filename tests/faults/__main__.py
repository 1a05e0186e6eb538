"""`python -m tests.faults --count 1000 --seed 0`."""

import sys

from tests.faults.run import main

sys.exit(main())
