"""torch_xla as the backend's runtime. No other package imports torch_xla."""
