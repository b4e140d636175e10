"""`python -m chorus.server` is the `chorus` command."""

import sys

from .cli import main

sys.exit(main())
