"""What whoever routes a request must know: how its body changes on the way to the two instances; and what whoever looks
at instances does: their pages as tables. Plain values for the router, the command line and integrations; no server, no
client and no choice of instances."""
