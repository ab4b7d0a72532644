"""`python -m training`: the same as `roadmatch-train`."""

import sys

from training.cli import main

sys.exit(main())
