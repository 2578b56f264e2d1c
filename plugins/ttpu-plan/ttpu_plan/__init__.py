"""The planner: which mesh suits a model and a TPU slice, and what it is predicted to take."""
