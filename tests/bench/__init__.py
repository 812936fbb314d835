"""The parts of the benchmark that compute; what it measures is never asserted."""
