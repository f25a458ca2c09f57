"""The physical half, one per rank: manifest, handshakes, plans, transfers. Scheduling is none of its business."""
