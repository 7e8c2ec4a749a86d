"""``python -m smoothctx``."""

import sys

from .cli import main

sys.exit(main())
