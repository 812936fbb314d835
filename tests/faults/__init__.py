"""Faults on real servers, row by row; run by `make faults`."""
