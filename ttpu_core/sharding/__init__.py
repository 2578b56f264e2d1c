"""Sharding a model over devices: strategies, meshes, padding of uneven heads, and the hardware table."""
