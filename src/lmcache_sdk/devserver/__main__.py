"""`python -m lmcache_sdk.devserver`."""

import sys

from lmcache_sdk.devserver.cli import run

if __name__ == "__main__":
    sys.exit(run())
