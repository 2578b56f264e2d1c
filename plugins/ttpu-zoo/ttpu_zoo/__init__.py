"""A second circle of model families: one module for each group of model types that differ in little."""
