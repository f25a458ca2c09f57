"""What whoever routes a request must know: how its body changes on the way to the two instances. Plain values for the
router and for integrations; no server, no client and no choice of instances."""
