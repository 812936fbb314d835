"""Coverage-guided fuzzing of everything that reads what a server sent; see README.md."""
