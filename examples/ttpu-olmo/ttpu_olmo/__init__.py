"""OLMo, as TTPU plugins: one module per `model_type`."""
