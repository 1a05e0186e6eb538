"""`python -m tests.user_loops --count 2000 --seed 0`."""

import sys

from tests.user_loops.run import main

sys.exit(main())
