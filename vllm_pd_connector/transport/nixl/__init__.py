"""NIXL over UCX; imported when an instance uses it. Nothing else names the library."""
