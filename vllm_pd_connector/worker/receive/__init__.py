"""A decode worker's receives: reading, or asking to be written into, and comparing what arrived.

Here: what carries out the actions of `protocol.receive`. Never here: deciding them.
"""
