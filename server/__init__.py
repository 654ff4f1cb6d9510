"""The server: a gateway, a pool of stock vLLM engines, and the scheduler inside each engine."""
