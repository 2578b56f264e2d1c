"""How a model is sharded over devices: strategies, meshes, padding of uneven heads, and the hardware table."""
