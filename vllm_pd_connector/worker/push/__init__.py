"""A prefill worker's part of pushes: commands in, writes out, completions back to its scheduler half.

Never here: which pushes there are, which is `protocol.push`.
"""
