"""Carrying out staged transfers: the staging buffer, its slots, and strided copies on a CPU or a GPU.

Never here: which copies there are, which is `geometry.staging`.
"""
