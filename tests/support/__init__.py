"""What tests build and share: worlds, builders, stand-ins, ports. No test is here, and no test imports another."""
