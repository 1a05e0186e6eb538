"""`python -m tests.fuzz --models 2000 --seed 0`."""

import sys

from tests.fuzz.run import main

sys.exit(main())
