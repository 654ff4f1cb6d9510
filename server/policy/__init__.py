"""The scheduling policy: pure Python, time passed in, the same objects live and simulated."""
