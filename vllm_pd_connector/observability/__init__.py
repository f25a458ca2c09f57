"""What operators and tests see: counters, Prometheus series, the digest trace. Nothing here decides anything."""
