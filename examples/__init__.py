"""Scripts to run (`python examples/demo.py`), and what tests and benchmarks start servers with."""
