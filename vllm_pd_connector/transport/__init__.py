"""Moving runs of bytes between registered memories: the port (`base`), its implementations by name (`registry`).

A new transport goes into a folder of its own, or into a package of its own, is an entry of the registry's group, and
passes `tests/transport/test_conformance.py`. Never here: blocks,
layouts, requests, or a decision what to move.
"""
