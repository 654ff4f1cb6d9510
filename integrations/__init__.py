"""Adapters for frameworks in which context cannot flow by itself."""
