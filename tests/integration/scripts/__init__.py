"""Programs as users write them, run as processes of their own."""
