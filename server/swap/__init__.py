"""Whose KV block lies in which slot of host memory; pure."""
