"""`python -m ceilingd`."""

from ceilingd.cli import main

raise SystemExit(main())
