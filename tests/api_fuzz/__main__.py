"""`python -m tests.api_fuzz --cases 10000 --seed 0`."""

import sys

from tests.api_fuzz.run import main

sys.exit(main())
