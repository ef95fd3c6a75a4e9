"""``python -m penstock``."""

from penstock.cli import main

raise SystemExit(main())
