"""Several gateway processes on one address: who starts them, and how they talk."""
