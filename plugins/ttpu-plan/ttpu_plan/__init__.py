"""The planner: chooses a mesh for a model on a TPU slice, and predicts its memory and time."""
