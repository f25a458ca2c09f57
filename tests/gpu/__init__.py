"""The acceptance kit for machines with GPUs: `make gpu` there, and send back `out/gpu/report.md`.

Each section is a program of its own (`python -m tests.gpu.conversion`) with a limit, so that one that hangs or ends its
process leaves the others their time. `kit` runs them and writes the report. Never here: tests, which are marked `gpu`
and stand where all tests stand.
"""
