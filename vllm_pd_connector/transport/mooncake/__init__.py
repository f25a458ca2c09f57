"""Mooncake's Transfer Engine, and what it lacks: opening peers apart. That they live is told by `transport.liveness`.

Imported when an instance uses it. Nothing else names the library.
"""
