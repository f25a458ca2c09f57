"""The side channel's messages: every byte that crosses it is decoded here, strictly and within bounds.

A new message goes here, with its bounds. Never here: what is done about it. Tags and field names are the wire: a class
may be renamed, they may not.
"""
