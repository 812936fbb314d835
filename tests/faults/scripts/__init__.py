"""Client processes that the fault tests stop, kill and interrupt."""
