"""Tests against the released servers; README.md tells how to run them."""
