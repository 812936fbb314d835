"""The soak: many clients on real servers while servers and clients are frozen and killed (`make soak`)."""
